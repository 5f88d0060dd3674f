"""Measures useful tokens per CPU-second: our engine, which refills slots, beside `transformers.generate` in batches.

Both sample the same requests with the same model on one thread. The rival has an advantage: it knows the longest
completion of each batch beforehand, stops there, and returns no log-probabilities. Where vLLM is installed, it samples
them too. Then prompts of groups, a long prompt beside running samples, the memory of the cache, and episodes of several
turns. The last lines are all goals with what was measured.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from time import monotonic, process_time, thread_time
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.bench.benchmark_model import SPECIAL, VOCABULARY, EndlessEngine, write_model
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
from asyncrl.engines.generation.vllm.vllm_generation import VllmGeneration
from asyncrl.engines.models.model_loading import load_pretrained
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.fleet.worker.worker_spec import Addresses, RunFacts, WorkerSpec
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.lanes.data.row_reader import RowReader
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.rank_layout import Layout
from asyncrl.telemetry.state_clock import Occupancy, StateClock
from asyncrl.telemetry.trace import Tracer

# vLLM behind asyncrl's interface of engines, as a side of a measurement.


VLLM_DEADLINE = 600.0
"""Seconds that vLLM may take to start, or to sample all requests once."""


class VllmSide:
    """Samples requests to their full lengths with vLLM, which runs on while other sides are measured. It is started
    when it is made; `close` ends it."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._runner = asyncio.Runner()
        self._done = list[Completion]()
        self._runner.run(self._open(folder, config))

    def complete(self, work: Sequence[SampleRequest]) -> list[Completion]:
        """Submits all requests at once; returns them when all are finished."""
        done: list[Completion] = self._runner.run(self._complete(work))
        return done

    def close(self) -> None:
        self._engine.close()
        self._runner.close()

    async def _open(self, folder: Path, config: Config) -> None:
        loop = asyncio.get_running_loop()
        clock = StateClock(monotonic)
        facts = RunFacts("bench", folder, folder, 0, "", config)
        addresses = Addresses.inproc("generation")
        options = {"own_version": 0}
        spec = WorkerSpec("generation", 0, 0, Layout(), "generation0.0", "", addresses, facts, options)
        occupancy = Occupancy(clock)
        context = WorkerContext(
            spec=spec,
            reader=RowReader(InprocWire(), spec.hello),
            compute=ThreadCompute(occupancy),
            clock=clock,
            occupancy=occupancy,
            tracer=Tracer(None, "bench"),
            log=structlog.get_logger(),
            tasks=asyncio.TaskGroup(),
            open_rows=lambda slots, row_bytes: RowStore.private("inproc://bench", slots, row_bytes),
        )
        async with asyncio.timeout(VLLM_DEADLINE):
            self._engine = await VllmGeneration.open(context)
        self._engine.end_ids = np.zeros(0, np.int64)
        self._wakeup = asyncio.Event()
        self._loop = loop.create_task(self._engine.run(self._deliver), name="vllm")

    def _deliver(self, completions: Sequence[Completion]) -> None:
        self._done += completions
        self._wakeup.set()

    async def _complete(self, work: Sequence[SampleRequest]) -> list[Completion]:
        self._done = []
        await self._engine.submit(work)
        async with asyncio.timeout(VLLM_DEADLINE):
            while len(self._done) < len(work):
                await self._wakeup.wait()
                self._wakeup.clear()
        return self._done


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


# Measures steps of samples that decode while a long prompt is computed beside them, and the memory of the cache.


LONG_PROMPT = 4096
SHORT_PROMPT = 32
SAMPLED_BESIDE = 640
WARM_STEPS = 20
SLOWEST = 99  # percentile of the steps
LONGEST_STEP_GOAL = 2.0
MEMORY_GOAL = 1.1
PAGE = os.sysconf("SC_PAGE_SIZE")


def measure_long_prompt(model: Path, slots: int, rounds: int) -> list[str]:
    """Prints the CPU time of the steps, the least of all rounds for each step; returns the lines of the goals."""
    load = MachineLoad()
    task = {"prompts": "none", "max_prompt_tokens": LONG_PROMPT}
    generation = {"slots": slots, "max_new_tokens": SAMPLED_BESIDE}
    config = Config.model_validate({"model": {"name": "tiny"}, "task": task, "generation": generation})
    engine = EndlessEngine(model, config, version=0)
    steps = 1000 * np.min([seconds_of_steps(engine, slots) for _ in range(rounds)], axis=0)
    middle, slow = np.percentile(steps, [50, SLOWEST])
    print(f"a prompt of {LONG_PROMPT:,} tokens beside {slots - 1} samples: {len(steps)} steps until its first token")
    print(f"  CPU time of a step: median {middle:.3g} ms, p{SLOWEST} {slow:.3g}, longest {steps.max():.3g}")
    cache = engine._flat.cache
    resident = resident_bytes(chain.from_iterable(cache._layers))
    computed = cache.bytes
    print(f"  keys and values: {resident / 1e6:.1f} MB of memory, {computed / 1e6:.1f} MB computed\n  {load}\n")
    label = f"a step's p{SLOWEST} over its median beside a long prompt"
    return [
        goal_line(label, slow / middle, LONGEST_STEP_GOAL, at_most=True),
        goal_line("memory of the cache over what is computed", resident / computed, MEMORY_GOAL, at_most=True),
    ]


def seconds_of_steps(engine: EndlessEngine, slots: int) -> NDArray[np.float64]:
    """Returns the CPU seconds of each step from the arrival of the long prompt to its first token."""
    source = np.random.default_rng(0)
    prompts = source.integers(len(SPECIAL), VOCABULARY, (slots - 1, SHORT_PROMPT)).astype(np.int32)
    beside = [
        SampleRequest((number, 0, 0), prompt, number, 1.0, SAMPLED_BESIDE) for number, prompt in enumerate(prompts)
    ]
    engine.submit(*beside)
    for _ in range(WARM_STEPS):
        engine.step()
    long = source.integers(len(SPECIAL), VOCABULARY, LONG_PROMPT).astype(np.int32)
    engine.submit(SampleRequest((slots, 0, 0), long, slots, 1.0, 1))
    seconds = list[float]()
    while engine.running in (slots - 1, slots) and (engine.waiting or engine.running == slots):
        began = thread_time()
        engine.step()
        seconds.append(thread_time() - began)
    engine.end([request.key for request in beside], "abort")
    return np.array(seconds)


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the pages of these tensors, on the CPU, that the system has provided."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        found = 0
        for tensor in tensors:
            first = tensor.data_ptr() // PAGE
            pages = -(-(tensor.data_ptr() + tensor.nbytes) // PAGE) - first
            entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * pages, 8 * first), np.uint64)
            found += PAGE * int(np.count_nonzero(entries >> np.uint64(63)))
    return found


# Measures episodes of several turns: keys and values parked between turns, beside prefilling each turn again.


EPISODES = 64
TURNS = 6
FIRST_PROMPT = 64
TURN_TOKENS = 24
GIVEN = 16
MAX_TOKENS = TURNS * (TURN_TOKENS + GIVEN)
TURNS_GOAL = 1.2


def measure_turns(model: Path, slots: int, rounds: int) -> list[str]:
    """Prints the sampled tokens a CPU-second of both sides; returns the lines of the goals."""
    load = MachineLoad()
    tokens = EPISODES * TURNS * TURN_TOKENS
    task = {"prompts": "none", "max_prompt_tokens": FIRST_PROMPT}
    generation = {"slots": slots, "max_new_tokens": TURN_TOKENS}
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
    print(
        f"{EPISODES} episodes of {TURNS} turns, {TURN_TOKENS} tokens sampled and {GIVEN} given in each, {slots} slots"
    )
    print(table(("", "sampled tokens per CPU-second"), [(side, str(values)) for side, values in found.items()]))
    ratio = ratios(found["parked"], found["prefilled again"])
    print(f"  ratio per round: {ratio}; of the turns that went on {share_of_hits(engine):.0%} had been parked")
    largest = max(float(np.abs(a - b).max()) for a, b in zip(logprobs[True], logprobs[False], strict=True))
    print(f"  {load}\n")
    return [
        goal_line("turns on parked keys and values over turns prefilled again", ratio.median, TURNS_GOAL),
        goal_line("largest difference of log-probs between both", largest, 1e-4, at_most=True),
    ]


def share_of_hits(engine: EndlessEngine) -> float:
    """Returns the share of later turns that had been parked, of the runs that parked."""
    return 2 * engine.parked.hits / (engine.parked.hits + engine.parked.misses)


def play(engine: EndlessEngine, *, parks: bool) -> list[Completion]:
    """Plays all episodes side by side; an environment answers at once. Returns the turns in the order of episodes."""
    source = np.random.default_rng(0)
    given = source.integers(len(SPECIAL), VOCABULARY, (EPISODES, TURNS, GIVEN)).astype(np.int32)
    prompts = source.integers(len(SPECIAL), VOCABULARY, (EPISODES, FIRST_PROMPT)).astype(np.int32)
    engine.submit(*(_first(number, prompt, parks=parks) for number, prompt in enumerate(prompts)))
    finished: list[Completion] = []
    while engine.active:
        done = engine.step()
        finished += done
        engine.submit(*_later(done, given))
    return sorted(finished, key=lambda each: (each.request.key, each.request.drawn))


def _first(number: int, prompt: np.ndarray, *, parks: bool) -> SampleRequest:
    return SampleRequest((number, 0, 0), prompt, number, 1.0, TURN_TOKENS, may_go_on=parks)


def _later(done: Sequence[Completion], given: np.ndarray) -> list[SampleRequest]:
    """Returns the next turns of episodes that have not ended."""
    asked = []
    for each in done:
        turn = each.request.drawn // TURN_TOKENS
        if turn + 1 < TURNS:
            so_far = [each.request.prompt, each.tokens, given[each.request.key[0], turn]]
            drawn = each.request.drawn + TURN_TOKENS
            goes_on = each.request.may_go_on and turn + 2 < TURNS
            asked.append(replace(each.request, prompt=np.concatenate(so_far), drawn=drawn, may_go_on=goes_on))
    return asked
