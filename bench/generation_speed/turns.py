"""Measures episodes of several turns: keys and values parked between turns, beside prefilling each turn again."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np

from asyncrl.bench.end_to_end.benchmark_model import SPECIAL, VOCABULARY, EndlessEngine
from asyncrl.bench.measurements import MachineLoad, goal_line, in_turn, ratios, round_values, table
from asyncrl.config.schema import Config
from asyncrl.engines.generation.engine_interface import Completion, SampleRequest

EPISODES = 64
TURNS = 6
PROMPT = 64
SAMPLED = 24
GIVEN = 16
MAX_TOKENS = TURNS * (SAMPLED + GIVEN)
GOAL = 1.2


def measure_turns(model: Path, slots: int, rounds: int) -> list[str]:
    """Prints the sampled tokens a CPU-second of both sides; returns the lines of the goals."""
    load = MachineLoad()
    tokens = EPISODES * TURNS * SAMPLED
    task = {"prompts": "none", "max_prompt_tokens": PROMPT}
    generation = {"slots": slots, "max_new_tokens": SAMPLED}
    environment = {"use": "none.py:None", "max_tokens": MAX_TOKENS, "max_turns": TURNS}
    sections = {"task": task, "generation": generation, "environment": environment}
    config = Config.model_validate({"model": {"name": "tiny"}, **sections})
    engine = EndlessEngine(model, config, version=0)
    logprobs: dict[bool, list[np.ndarray]] = {}

    def rate(*, parks: bool) -> float:
        began = process_time()
        done = play(engine, parks=parks)
        seconds = process_time() - began
        logprobs[parks] = [each.logprobs for each in done]
        return tokens / seconds

    sides: dict[str, Callable[[], float]] = {
        "parked": partial(rate, parks=True),
        "prefilled again": partial(rate, parks=False),
    }
    found = round_values(in_turn(sides, rounds))
    print(f"{EPISODES} episodes of {TURNS} turns, {SAMPLED} tokens sampled and {GIVEN} given in each, {slots} slots")
    print(table(("", "sampled tokens per CPU-second"), [(side, str(values)) for side, values in found.items()]))
    ratio = ratios(found["parked"], found["prefilled again"])
    print(f"  ratio per round: {ratio}; of the turns that went on {share_of_hits(engine):.0%} had been parked")
    largest = max(float(np.abs(a - b).max()) for a, b in zip(logprobs[True], logprobs[False], strict=True))
    print(f"  {load}\n")
    return [
        goal_line("turns on parked keys and values over turns prefilled again", ratio.median, GOAL),
        goal_line("largest difference of log-probs between both", largest, 1e-4, at_most=True),
    ]


def share_of_hits(engine: EndlessEngine) -> float:
    """Returns the share of later turns that had been parked, of the runs that parked."""
    return 2 * engine.parked.hits / (engine.parked.hits + engine.parked.misses)


def play(engine: EndlessEngine, *, parks: bool) -> list[Completion]:
    """Plays all episodes side by side; an environment answers at once. Returns the turns in the order of episodes."""
    source = np.random.default_rng(0)
    given = source.integers(len(SPECIAL), VOCABULARY, (EPISODES, TURNS, GIVEN)).astype(np.int32)
    prompts = source.integers(len(SPECIAL), VOCABULARY, (EPISODES, PROMPT)).astype(np.int32)
    engine.submit(*(_first(number, prompt, parks=parks) for number, prompt in enumerate(prompts)))
    finished: list[Completion] = []
    while engine.active:
        done = engine.step()
        finished += done
        engine.submit(*_later(done, given))
    return sorted(finished, key=lambda each: (each.request.key, each.request.drawn))


def _first(number: int, prompt: np.ndarray, *, parks: bool) -> SampleRequest:
    return SampleRequest((number, 0, 0), prompt, number, 1.0, SAMPLED, may_go_on=parks)


def _later(done: Sequence[Completion], given: np.ndarray) -> list[SampleRequest]:
    """Returns the next turns of episodes that have not ended."""
    asked = []
    for each in done:
        turn = each.request.drawn // SAMPLED
        if turn + 1 < TURNS:
            so_far = [each.request.prompt, each.tokens, given[each.request.key[0], turn]]
            drawn = each.request.drawn + SAMPLED
            goes_on = each.request.may_go_on and turn + 2 < TURNS
            asked.append(replace(each.request, prompt=np.concatenate(so_far), drawn=drawn, may_go_on=goes_on))
    return asked
