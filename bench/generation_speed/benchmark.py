"""Measures useful tokens per CPU-second: our engine, which refills slots, beside `transformers.generate` in batches.

Both sample the same requests with the same model on one thread. The rival has an advantage: it knows the longest
completion of each batch beforehand, stops there, and returns no log-probabilities. Where vLLM is installed, it samples
them too. Then prompts of groups, a long prompt beside running samples, the memory of the cache, and episodes of several
turns. The last lines are all goals with what was measured.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.bench.end_to_end.benchmark_model import SPECIAL, VOCABULARY, EndlessEngine, write_model
from asyncrl.bench.generation_speed.long_prompt import measure_long_prompt
from asyncrl.bench.generation_speed.turns import measure_turns
from asyncrl.bench.generation_speed.vllm_side import VllmSide
from asyncrl.bench.measurements import (
    MachineLoad,
    at_least,
    goal_line,
    in_turn,
    own_seconds,
    ratios,
    round_values,
    table,
)
from asyncrl.config.schema import Config
from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.models.model_loading import load_pretrained

PROMPTS = 256
SHORTEST_PROMPT = 8
LONGEST_PROMPT = 64
FEWEST = 16
MOST = 128
EQUAL = 32
SLOTS = 32
GOALS = {"16 to 128 tokens": 2.5, "all 32 tokens": 1.2}
NO_VLLM = "  not measured  asyncrl over vllm, goal at least 1: vLLM is not in this environment (scripts/set-up-vllm)"
NOTHING: Mapping[str, Any] = {}
STAGES = ("forward", "sampling", "bookkeeping")
GROUPS = 2
MEMBERS = 8
PROMPT = 512
GOAL = 4.0


def complete(engine: EndlessEngine, work: Sequence[SampleRequest]) -> list[Completion]:
    """Submits all requests at once and decodes until they are finished."""
    for request in work:
        engine.submit(request)
    finished: list[Completion] = []
    while engine.active:
        finished += engine.step()
    return finished


class TimedEngine(EndlessEngine):
    """Measures the CPU seconds of each stage; bookkeeping is the rest of a step."""

    def __init__(self, folder: Path, config: Config) -> None:
        super().__init__(folder, config, version=0)
        self.spent = dict.fromkeys(STAGES, 0.0)
        self.steps = 0
        self._flat.logits = self._timed("forward", self._flat.logits)  # type: ignore[method-assign]

    def step(self) -> list[Completion]:
        self.steps += 1
        done: list[Completion] = self._timed("bookkeeping", super().step)()
        return done

    def _sample(self, logits: Tensor, rows: NDArray[np.int64]) -> Any:
        return self._timed("sampling", super()._sample)(logits, rows)

    def _timed(self, stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            inner = sum(self.spent.values())
            began = time.thread_time()
            result = work(*args)
            self.spent[stage] += time.thread_time() - began - (sum(self.spent.values()) - inner)
            return result

        return timed


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench generation", description=__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--slots", type=at_least(1), default=SLOTS, help="slots of our engine; rivals: batches of 32")
    default = "torch" if find_spec("vllm") is None else "vllm"
    parser.add_argument(
        "--engine", choices=("torch", "vllm"), default=default, help=f"vllm: measures vLLM beside both; here {default}"
    )
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile the model, which takes it a minute")
    options = parser.parse_args(arguments)
    if options.engine == "vllm" and find_spec("vllm") is None:
        parser.error(
            "argument --engine: vLLM is not in this environment; run scripts/set-up-vllm, and then "
            ".venvs/vllm/bin/asyncrl-bench generation"
        )
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        model = write_model(Path(folder) / "model")
        config = config_of(options.slots, "vllm", {"enforce_eager": False} if options.compiled else {})
        vllm = VllmSide(model, config) if options.engine == "vllm" else None
        goals = list[str]()
        with closing(vllm) if vllm is not None else nullcontext():
            for name, goal in GOALS.items():
                work = work_of(equal=name.startswith("all"))
                goals += measure(name, goal, work, model, options.slots, options.rounds, vllm)
        for part in (measure_group_prompts, measure_long_prompt, measure_turns):
            goals += part(model, options.slots, options.rounds)
    print("\n".join(("goals", *goals, *([] if vllm is not None else [NO_VLLM]))))


def work_of(*, equal: bool) -> list[SampleRequest]:
    """Makes the same requests in every run."""
    source = np.random.default_rng(0)
    lengths = source.integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1, PROMPTS)
    prompts = [source.integers(len(SPECIAL), VOCABULARY, length).astype(np.int32) for length in lengths]
    new = np.full(PROMPTS, EQUAL) if equal else source.integers(FEWEST, MOST + 1, PROMPTS)
    return [
        SampleRequest((number, 0, 0), prompt, number, 1.0, int(length))
        for number, (prompt, length) in enumerate(zip(prompts, new, strict=True))
    ]


def config_of(slots: int, engine: str, vllm: Mapping[str, Any] = NOTHING) -> Config:
    """Returns the config of an engine. vllm: further arguments of vLLM."""
    task = {"prompts": "none", "max_prompt_tokens": LONGEST_PROMPT}
    generation = {"slots": slots, "max_new_tokens": MOST, "engine": engine, "vllm": dict(vllm)}
    return Config.model_validate({"model": {"name": "tiny"}, "task": task, "generation": generation})


def measure(
    name: str, goal: float, work: Sequence[SampleRequest], model: Path, slots: int, rounds: int, vllm: VllmSide | None
) -> list[str]:
    """Prints the useful tokens a CPU-second of all sides; returns the lines of the goals."""
    load = MachineLoad()
    tokens = sum(request.max_new_tokens for request in work)
    config = config_of(slots, "torch")
    engine = EndlessEngine(model, config, version=0)
    plain = load_pretrained(model, dtype=torch.float32).eval()
    plain.generation_config.eos_token_id = None

    def rate(run: Callable[[], object], cpu_seconds: Callable[[], float] = time.process_time) -> float:
        began = cpu_seconds()
        run()
        return tokens / (cpu_seconds() - began)

    ours = partial(complete, engine, work)
    theirs = partial(generate_in_batches, plain, work)
    sides = {"asyncrl": partial(rate, ours), "transformers.generate": partial(rate, theirs)}
    compared = {"asyncrl": ours}
    if vllm is not None:
        compared["vllm"] = partial(vllm.complete, work)
        sides["vllm"] = partial(rate, compared["vllm"], own_seconds)
    found = round_values(in_turn(sides, rounds))
    print(f"{name}: {tokens:,} useful tokens of {PROMPTS} prompts, {slots} slots, batch {SLOTS}, {rounds} rounds")
    print(table(("", "useful tokens per CPU-second"), [(side, str(values)) for side, values in found.items()]))
    goals = list[str]()
    for rival, least in {"transformers.generate": goal, "vllm": 1.0}.items():
        if rival in found:
            ratio = ratios(found["asyncrl"], found[rival])
            print(f"  ratio per round to {rival}: {ratio}")
            goals.append(goal_line(f"asyncrl over {rival}, {name}", ratio.median, least))
    print_stages(TimedEngine(model, config), work)
    for side, run in compared.items():
        largest = largest_difference(plain, run())
        goals.append(goal_line(f"largest difference of log-probs, {side} to transformers", largest, 1e-4, at_most=True))
    print(f"  {load}\n")
    return goals


def print_stages(timed: TimedEngine, work: Sequence[SampleRequest]) -> None:
    complete(timed, work)
    whole = sum(timed.spent.values())
    parts = ", ".join(f"{stage} {each / whole:.0%}" for stage, each in timed.spent.items())
    print(f"  one step of our engine: {1000 * whole / timed.steps:.2f} ms of CPU: {parts}")


@torch.inference_mode()
def generate_in_batches(model: Any, work: Sequence[SampleRequest], size: int = SLOTS) -> None:
    """Generates left-padded batches in the order of arrival; each runs to the length of its longest completion."""
    for start in range(0, len(work), size):
        batch = work[start : start + size]
        prompts = [request.prompt for request in batch]
        longest = max(map(len, prompts))
        ids = np.zeros((len(prompts), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        model.generate(
            input_ids=torch.from_numpy(ids).to(model.device),
            attention_mask=torch.from_numpy(mask).to(model.device),
            max_new_tokens=max(request.max_new_tokens for request in batch),
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )


@torch.no_grad()
def largest_difference(model: Any, completions: Sequence[Completion]) -> float:
    """Returns the largest difference over all sampled tokens; each completion has a forward pass of its own."""
    found = 0.0
    for done in completions:
        ids = torch.from_numpy(np.concatenate([done.request.prompt, done.tokens]).astype(np.int64))
        logits = model(input_ids=ids[None]).logits[0, len(done.request.prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, ids[len(done.request.prompt) :, None])[:, 0]
        found = max(found, float((expected - torch.from_numpy(done.logprobs)).abs().max()))
    return found


def measure_group_prompts(model: Path, slots: int, rounds: int) -> list[str]:
    """Prints the prefilled tokens a CPU-second of both sides; returns the lines of the goals."""
    load = MachineLoad()
    task = {"prompts": "none", "max_prompt_tokens": PROMPT}
    generation = {"slots": slots, "max_new_tokens": 1}
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
