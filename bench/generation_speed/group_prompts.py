"""Measures the prefill of groups whose members share a prompt, beside the prefill of each member's prompt by itself.

Each sample has one token, which the forward that ends its prompt samples, so that nothing is decoded.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np

from asyncrl.bench.end_to_end.benchmark_model import SPECIAL, VOCABULARY, EndlessEngine
from asyncrl.bench.measurements import MachineLoad, goal_line, in_turn, ratios, round_values, table
from asyncrl.config.schema import Config
from asyncrl.engines.generation.scheduling.sample_requests import SampleRequest

GROUPS, MEMBERS, PROMPT = 2, 8, 512
GOAL = 4.0


def measure_group_prompts(model: Path, slots: int, rounds: int) -> list[str]:
    """Prints the prefilled tokens a CPU-second of both sides; returns the lines of the goals."""
    load = MachineLoad()
    task, generation = {"prompts": "none", "max_prompt_tokens": PROMPT}, {"slots": slots, "max_new_tokens": 1}
    config = Config.model_validate({"model": {"name": "tiny"}, "task": task, "generation": generation})
    engine = EndlessEngine(model, config, version=0)

    def rate(requests: Sequence[SampleRequest]) -> float:
        began = process_time()
        engine.submit(*requests)
        while engine.active:
            engine.step()
        return GROUPS * MEMBERS * PROMPT / (process_time() - began)

    sides: dict[str, Callable[[], float]] = {
        "shared": partial(rate, prompts_of(shared=True)),
        "each by itself": partial(rate, prompts_of(shared=False)),
    }
    found = round_values(in_turn(sides, rounds))
    print(f"prefill alone: {GROUPS} groups of {MEMBERS} members, prompts of {PROMPT} tokens")
    print(table(("", "prompt tokens per CPU-second"), [(side, str(values)) for side, values in found.items()]))
    ratio = ratios(found["shared"], found["each by itself"])
    print(f"  ratio per round: {ratio}\n  {load}\n")
    return [goal_line("prefill of a group over each member's prompt by itself", ratio.median, GOAL)]


def prompts_of(*, shared: bool) -> list[SampleRequest]:
    """Makes requests of one token. shared: the members of a group have one prompt; else no two samples have."""
    prompts = np.random.default_rng(0).integers(len(SPECIAL), VOCABULARY, (GROUPS, MEMBERS, PROMPT)).astype(np.int32)
    return [
        SampleRequest((group, member, 0), prompts[group, 0 if shared else member], member, 1.0, 1)
        for group in range(GROUPS)
        for member in range(MEMBERS)
    ]
