"""Measures trained tokens per second, end to end: asyncrl beside TRL's synchronous GRPOTrainer and synchronous asyncrl.

All sides train the same model of three million random weights in float32 with the same optimizer, reward, batch of
64 x 8 samples, prescribed lengths and environment, without KL. They run in turn, so that changes of the machine affect
all of them. TRL runs with its defaults (except for the precision) and with the best settings of a grid; asyncrl runs at
limits 2 and 0, each with one and with two ranks of the trainer. asyncrl is compared with synchronous asyncrl of as many
ranks, and TRL with the fastest asyncrl. TRL needs an interpreter of its own: bench/rivals/setup trl, or TRL_PYTHON.

The default measures one workload once in about six minutes; the complete measurement is
--workload all --rounds 5 --search.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

from asyncrl.bench.measured_runs import environment, run_program, step_seconds, train
from asyncrl.bench.measurements import MachineLoad, at_least, goal_line, in_turn, number, ratios, round_values, table
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.protocols.service_contracts import Generation
from asyncrl.telemetry.jsonl import read_metrics
from asyncrl.telemetry.run_directory import RunDirectory

# Declares the workloads of the end-to-end measurement: prompts, completion lengths, and how fast a reward is.


GROUPS = 64
MEMBERS = 8
SAMPLES = GROUPS * MEMBERS
PROMPT_TOKENS = 8
PROMPTS = 1024
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Workload:
    """Describes what all sides train on. lengths: tokens of each sample of a batch. parallel_scores: samples that the
    slow reward scores at a time; 0: all; None: the reward takes no time. over_trl, over_synchronous: goals for the
    ratio of trained tokens per second."""

    name: str
    lengths: tuple[int, ...]
    parallel_scores: int | None
    over_trl: float
    over_synchronous: float


def workloads(parallel_scores: int) -> dict[str, Workload]:
    order = list(range(SAMPLES))
    random.Random(0).shuffle(order)
    same = (32,) * SAMPLES
    tailed = tuple(lognormal(SAMPLES, 32, 1.0, 256, order))
    slow_reward = f"a reward that takes 200 ms, {parallel_scores or 'all'} samples at a time"
    return {
        "equal": Workload("all completions 32 tokens", same, None, 1.4, 1.3),
        "lognormal": Workload("lognormal lengths (sigma 1, mean 32, cap 256)", tailed, None, 2.0, 1.7),
        "judge": Workload(slow_reward, same, parallel_scores, 2.0, 1.7),
    }


def lognormal(samples: int, mean: float, sigma: float, cap: int, order: Sequence[int]) -> list[int]:
    """Returns the quantiles of the distribution in this order, one per sample: a batch always has the same lengths.
    mean: before the cap; mean = exp(mu + sigma^2 / 2)."""
    normal = NormalDist()
    mu = math.log(mean) - sigma**2 / 2
    quantiles = [math.exp(mu + sigma * normal.inv_cdf((rank + 0.5) / samples)) for rank in range(samples)]
    return [min(cap, max(1, round(quantiles[place]))) for place in order]


def write_prompts(file: Path) -> None:
    source = random.Random(0)
    words = [" ".join(f"w{source.randrange(2000)}" for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))


# Runs one side of the end-to-end measurement in a process of its own: asyncrl, or TRL's GRPOTrainer.
#
#     python -m asyncrl.bench.end_to_end JSON
#
# is the process of asyncrl. JSON: `values` of the config, `lengths` of each sample of a batch, and `run_dir`.


BENCH = Path(__file__).resolve().parent
SAMPLER = "asyncrl.bench.benchmark_model:PrescribedLengths"
STAGES = ("generation", "reward", "training")
SLOTS = 256
MICRO_BATCH_TOKENS = 1312
THREADS = 1
"""Modes in which asyncrl runs."""
TRL_STAGES = {"generation": "generation", "reward": "reward_seconds"}


@dataclass(frozen=True, slots=True)
class SideResult:
    """Describes the steps after warm-up. rate: trained tokens per second. seconds, stages: per step, the whole and each
    stage. reward: mean of the last batch."""

    rate: float
    seconds: float
    stages: dict[str, float]
    reward: float


# ---- asyncrl ---------------------------------------------------------------------------------------------


def run_asyncrl(limit: int, ranks: int, workload: Workload, steps: int, warm: int, folder: Path) -> SideResult:
    """Trains with asyncrl. limit: of staleness, 0 for synchronous runs. ranks: of the trainer."""
    slow = workload.parallel_scores is not None
    reward: dict[str, Any] = {"use": f"asyncrl.bench.rivals.even_words_reward:{'slowly' if slow else 'at_once'}"}
    if slow:
        reward["options"] = {"parallel_scores": workload.parallel_scores}
    values = {
        "steps": steps + warm,
        "model.name": str(folder / "model"),
        "task.prompts": str(folder / "prompts.jsonl"),
        "task.prompts_per_step": GROUPS,
        "task.samples_per_prompt": MEMBERS,
        "task.max_prompt_tokens": PROMPT_TOKENS,
        "generation.slots": SLOTS,
        "generation.max_new_tokens": max(workload.lengths),
        "reward.functions": [reward],
        "training.learning_rate": LEARNING_RATE,
        "training.micro_batch_tokens": MICRO_BATCH_TOKENS,
        "training.checkpoint_every": 0,
        "training.layout": {"dp": ranks},
        "staleness.limit": limit,
        "fleet.threads": THREADS,
    }
    run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    request = {"values": values, "lengths": workload.lengths, "run_dir": str(run_dir)}
    run_program([sys.executable, "-m", __name__, json.dumps(request)], environment(THREADS))
    return asyncrl_result(read_metrics(RunDirectory(run_dir).metrics), warm)


def asyncrl_result(lines: Sequence[dict[str, Any]], warm: int) -> SideResult:
    """Reads the records of metrics.jsonl without the first `warm` steps."""
    seconds, stages = step_seconds(lines, warm, STAGES)
    counted = lines[warm:]
    tokens = sum(line["tokens/trained"] for line in counted)
    return SideResult(tokens / (seconds * len(counted)), seconds, stages, counted[-1]["reward/mean"])


# ---- TRL -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrlSettings:
    """Holds how TRL runs. generations: optimizer steps that one generation serves."""

    threads: int
    micro_batch: int
    generations: int = 1
    gradient_checkpointing: bool = False

    def __str__(self) -> str:
        checkpointing = ", gradient checkpointing" if self.gradient_checkpointing else ""
        batches = f"micro-batch {self.micro_batch}, {self.generations} steps a generation"
        return f"{self.threads} threads, {batches}{checkpointing}"


TRL_DEFAULTS = TrlSettings(threads=os.cpu_count() or 1, micro_batch=8, gradient_checkpointing=True)
"""TRL's defaults except for the precision."""


def trl_python() -> Path:
    return Path(os.environ.get("TRL_PYTHON", BENCH.parent / ".venvs/trl/bin/python"))


def run_trl(settings: TrlSettings, workload: Workload, steps: int, warm: int, folder: Path) -> SideResult:
    """Trains with TRL. steps, warm: generations, each of which serves `settings.generations` optimizer steps."""
    request = {
        **asdict(settings),
        "prompts": GROUPS,
        "members": MEMBERS,
        "lengths": workload.lengths,
        "parallel_scores": workload.parallel_scores,
        "steps": (steps + warm) * settings.generations,
        "learning_rate": LEARNING_RATE,
        "model": str(folder / "model"),
        "prompts_file": str(folder / "prompts.jsonl"),
        "output": str(folder / "trl"),
        "reward_folder": str(BENCH / "rivals"),
    }
    command = [str(trl_python()), str(BENCH / "rivals/trl_grpo.py"), json.dumps(request)]
    output = run_program(command, environment(settings.threads))
    (result,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return trl_result(json.loads(result.removeprefix("RESULT ")), warm * settings.generations)


def trl_result(lines: Sequence[dict[str, Any]], warm: int) -> SideResult:
    """Reads the steps of `trl_grpo.py`; the time beside generation and reward is training."""
    counted = lines[warm:]
    seconds = counted[-1]["ended"] - lines[warm - 1]["ended"]
    stages = {name: sum(line[key] for line in counted) / len(counted) for name, key in TRL_STAGES.items()}
    stages["training"] = seconds / len(counted) - sum(stages.values())
    rewards = [line["reward"] for line in counted if line["reward"] is not None]
    return SideResult(sum(line["tokens"] for line in counted) / seconds, seconds / len(counted), stages, rewards[-1])


LIMIT = 2
WARM = 3
TRL_WARM = 1
BEST = TrlSettings(threads=2, micro_batch=64)
GRID = [
    TrlSettings(threads, micro_batch, generations)
    for threads in (1, 2)
    for micro_batch in (32, 64, 128)
    for generations in (1, 2)
]
"""TRL pads a batch to its longest completion with every micro-batch."""
ASYNC = "asyncrl"
SYNC = "asyncrl, limit 0"
DEFAULT = "TRL, defaults"
TUNED = "TRL, best settings"
ASYNC_TWO = "asyncrl, 2 ranks"
SYNC_TWO = "asyncrl, limit 0, 2 ranks"
COMPUTING = ("generation", "training")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench end-to-end", description=__doc__)
    parser.add_argument("--workload", choices=["equal", "lognormal", "judge", "all"], default="equal")
    parser.add_argument("--rounds", type=at_least(1), default=1)
    parser.add_argument("--steps", type=at_least(1), default=3, help="counted steps of TRL; asyncrl runs twice as many")
    parser.add_argument("--seats", type=at_least(0), default=32, help="samples a slow reward scores at a time; 0: all")
    parser.add_argument("--search", action="store_true", help="find TRL's best settings on the grid first")
    parser.add_argument("--without-trl", action="store_true")
    options = parser.parse_args(arguments)
    if not options.without_trl and not trl_python().exists():
        raise SystemExit(f"{trl_python()} does not exist; run bench/rivals/setup trl, or use --without-trl")
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = Path(name)
        # In a process of its own, because this process loads no torch.
        module = "asyncrl.bench.benchmark_model"
        program = f"from {module} import *; write_model(Path({str(folder / 'model')!r}))"
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
        write_prompts(folder / "prompts.jsonl")
        for key, workload in workloads(options.seats).items():
            if options.workload in (key, "all"):
                measure(workload, options, folder)


def measure(workload: Workload, options: argparse.Namespace, folder: Path) -> None:
    load = MachineLoad()
    print(f"{workload.name}: {sum(workload.lengths):,} tokens a step, {options.rounds} rounds", flush=True)

    def ours(limit: int, ranks: int) -> Callable[[], SideResult]:
        return lambda: run_asyncrl(limit, ranks, workload, 2 * options.steps, WARM, folder)

    def theirs(settings: TrlSettings) -> Callable[[], SideResult]:
        return lambda: run_trl(settings, workload, options.steps, TRL_WARM, folder)

    sides = {ASYNC: ours(LIMIT, 1), ASYNC_TWO: ours(LIMIT, 2), SYNC: ours(0, 1), SYNC_TWO: ours(0, 2)}
    if not options.without_trl:
        best = search(workload, folder) if options.search else BEST
        sides |= {TUNED: theirs(best), DEFAULT: theirs(TRL_DEFAULTS)}
        print(f"  TRL's best settings: {best}; its defaults: {TRL_DEFAULTS}")
    report(workload, in_turn(sides, options.rounds))
    print(f"  {load}\n", flush=True)


def search(workload: Workload, folder: Path) -> TrlSettings:
    """Finds the fastest settings of the grid; each runs for two steps."""
    found = {each: run_trl(each, workload, 2, TRL_WARM, folder) for each in GRID}
    ranked = sorted(found, key=lambda each: -found[each].rate)
    print(table(("TRL's grid", "tokens/s"), [(str(each), number(found[each].rate)) for each in ranked]))
    return ranked[0]


def report(workload: Workload, found: Mapping[str, Sequence[SideResult]]) -> None:
    rates = round_values({name: [each.rate for each in results] for name, results in found.items()})
    rows = [(name, str(rates[name]), *_cells(results)) for name, results in found.items()]
    print(table(("", "trained tokens/s", "s a step", *(f"{stage}, s" for stage in STAGES), "reward"), rows))
    best = max((ASYNC, ASYNC_TWO), key=lambda name: rates[name].median)
    goals = {SYNC: workload.over_synchronous, SYNC_TWO: workload.over_synchronous, TUNED: workload.over_trl}
    for ours, other in ((ASYNC, SYNC), (ASYNC_TWO, SYNC_TWO), (best, TUNED), (best, DEFAULT)):
        if other in found:
            ratio = ratios(rates[ours], rates[other])
            line = f"{ours} over {other} {ratio}"
            print(goal_line(line, ratio.median, goals[other]) if other in goals else f"  {line}")
    explain(found, {name: values.median for name, values in rates.items()})


def _stage(results: Sequence[SideResult], stage: str) -> float:
    """Returns the median of the seconds that a stage takes."""
    return median(each.stages[stage] for each in results)


def _cells(results: Sequence[SideResult]) -> list[str]:
    seconds = median(each.seconds for each in results)
    stages = (_stage(results, stage) for stage in STAGES)
    return [*map(number, (seconds, *stages)), f"{results[-1].reward:.3f}"]


def explain(found: Mapping[str, Sequence[SideResult]], rates: Mapping[str, float]) -> None:
    """Divides the gain over TRL into engine, training step and overlap. Engine and step: ratios of the seconds that a
    stage takes while no other stage runs; overlap: the ratio of rates of asynchronous and synchronous asyncrl."""
    slowdown = {stage: _stage(found[ASYNC], stage) / _stage(found[SYNC], stage) for stage in COMPUTING}
    listed = " and ".join(f"{stage} {ratio:.2f}" for stage, ratio in slowdown.items())
    print(f"  seconds of each stage while stages overlap, over its seconds at limit 0: {listed}")
    if TUNED in found:
        engine, step = (_stage(found[TUNED], stage) / _stage(found[SYNC], stage) for stage in COMPUTING)
        overlap = rates[ASYNC] / rates[SYNC]
        print(f"  over TRL with its best settings: engine {engine:.2f}, step {step:.2f}, overlap {overlap:.2f}")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    sampler = ServiceSpec("generation", Generation, SAMPLER, options={"lengths": given["lengths"]})
    train(given["values"], Path(given["run_dir"]), {"generation": sampler})
