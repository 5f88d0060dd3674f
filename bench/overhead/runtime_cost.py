"""Measures what the runtime costs: stages that only sleep against their theoretical bound, and the CPU of tracing.

The bound of a step is max(longest stage, C / (limit + 1)), where C is the time of one batch from its draw to its
weights. Stages share out their time over the groups of a step, so C is the time of a batch through the pipeline.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from asyncrl.bench.measured_runs import run_program, step_seconds, train, write_empty_model
from asyncrl.bench.measurements import (
    MachineLoad,
    RoundValues,
    at_least,
    goal_line,
    in_turn,
    number,
    ratios,
    round_values,
    table,
)
from asyncrl.bench.overhead.sleeping_services import stages
from asyncrl.config.sources import load
from asyncrl.engines.models.model_preparation import prepare
from asyncrl.telemetry.jsonl import read_metrics
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.trace import SUFFIX, Tracer, merge_traces

WARM = 4
"""Steps at the start that are not counted, because the pipeline fills."""
GROUPS = 8
MEMBERS = 8
LIMIT = 2
SETTINGS = {"200/40/40/200 ms": ((0.2, 0.04, 0.04, 0.2), 0.99), "50/10/10/50 ms": ((0.05, 0.01, 0.01, 0.05), 0.97)}
TRACING = 0.01
QUICKSTART_DEADLINE = 600.0
"""Seconds."""
EVENT_ROUNDS = 5
TRACED_CALLS = 400
ARROWS = 16
CACHED_BYTES = 8 << 20
"""More than the private caches of a core hold."""

STAGES = ("generation", "reward", "reference", "training")
StageSeconds = tuple[float, float, float, float]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench overhead", description=__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--steps", type=at_least(1), default=60, help="of each emulated run")
    parser.add_argument("--traced-steps", type=at_least(1), default=60, help="of each run of the quickstart")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        for name, (seconds, goal) in SETTINGS.items():
            emulate(name, seconds, goal, asked.steps, asked.rounds, Path(folder))
        cost_of_tracing(asked.traced_steps, asked.rounds, Path(folder))


# ---- emulated stages -------------------------------------------------------------------------------------


class SleepingStep(NamedTuple):
    """Holds the seconds of a step, and the sleep of each stage in it, means without warm-up."""

    seconds: float
    slept: dict[str, float]

    @property
    def bound(self) -> float:
        return bound(self.slept.values())


def emulate(name: str, seconds: StageSeconds, goal: float, steps: int, rounds: int, folder: Path) -> None:
    watched = MachineLoad()
    found = [emulated_run(seconds, steps, folder) for _ in range(rounds)]
    rows = []
    for turn, each in enumerate(found, 1):
        slept = " / ".join(number(1000 * stage) for stage in each.slept.values())
        milliseconds = [number(1000 * each.seconds), number(1000 * each.bound)]
        rows.append((f"round {turn}", *milliseconds, f"{each.bound / each.seconds:.3f}", slept))
    print(f"{name} (generation/reward/reference/training), {GROUPS} x {MEMBERS} samples, limit {LIMIT}, {steps} steps")
    print(table(("", "step, ms", "bound, ms", "bound / step", "slept a step, ms"), rows))
    nominal = RoundValues(tuple(bound(seconds) / each.seconds for each in found))
    print(f"  bound of the nominal sleeps / step: {nominal}")
    print(goal_line("bound of the true sleeps / step", median(each.bound / each.seconds for each in found), goal))
    print(f"  {watched}\n")


def bound(seconds: Iterable[float]) -> float:
    """Returns the least seconds of a step: a batch passes reward and reference side by side, group by group."""
    generation, reward, reference, training = seconds
    cycle = generation + max(reward, reference) / GROUPS + training
    return max(generation, reward, reference, training, cycle / (LIMIT + 1))


def emulated_run(seconds: StageSeconds, steps: int, folder: Path) -> SleepingStep:
    run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    model = write_empty_model(folder / "nothing")
    values = {
        "model.name": str(model),
        "steps": steps,
        "task.prompts": "asyncrl.bench.overhead.sleeping_services:prompts",
        "task.prompts_per_step": GROUPS,
        "task.samples_per_prompt": MEMBERS,
        "staleness.limit": LIMIT,
        "algorithm.kl": 0.1,
        "training.checkpoint_every": 0,
    }
    train(values, run_dir, stages(*seconds))
    return SleepingStep(*step_seconds(read_metrics(RunDirectory(run_dir).metrics), WARM, STAGES))


# ---- tracing ---------------------------------------------------------------------------------------------


def cost_of_tracing(steps: int, rounds: int, folder: Path) -> None:
    """Measures the same runs with and without `telemetry.trace`, whole process trees. Two equal runs differ by more
    than tracing may cost, so the cost of one event times the number of events is measured too."""
    watched = MachineLoad()
    model = asyncio.run(prepare(load("quickstart").config, folder / "quickstart", lambda text: None))
    events: list[int] = []

    def cpu_seconds(trace: bool) -> float:
        run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
        seconds = cpu_of_quickstart(steps, trace, model, run_dir)
        if trace:
            events.append(sum(path.read_bytes().count(b"\n") for path in (run_dir / "logs").glob(f"*{SUFFIX}")))
        return seconds

    sides = {"traced": partial(cpu_seconds, True), "untraced": partial(cpu_seconds, False)}
    found = round_values(in_turn(sides, rounds))
    print(f"tracing the quickstart, {steps} steps: CPU-seconds of all processes, start included, {rounds} rounds")
    print(table(("", "CPU-seconds"), [(side, str(values)) for side, values in found.items()]))
    difference = RoundValues(tuple(ratio - 1 for ratio in ratios(found["traced"], found["untraced"]).values))
    print(f"  difference of each round: {difference}, which includes the noise between equal runs")
    cost = median(seconds_of_event(folder) for _ in range(EVENT_ROUNDS))
    print(f"  {median(events):,.0f} events of {number(1e6 * cost)} µs each")
    share = median(events) * cost / found["untraced"].median
    print(goal_line("tracing's share of CPU, counted", share, TRACING, at_most=True))
    print(f"  {watched}")


def seconds_of_event(folder: Path) -> float:
    """Returns the seconds from recording an event to its line in the merged file. Other work empties the caches between
    two calls, as it does in a worker; each call is a span in which the arrows of a group leave."""
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    tracer = Tracer(run_dir / "logs" / f"generation0.0{SUFFIX}", "generation0.0")
    other = np.zeros(CACHED_BYTES, np.uint8)
    spent = 0.0
    for group in range(TRACED_CALLS):
        other += 1
        began = time.perf_counter()
        with tracer.span("generate", group=group):
            for member in range(ARROWS):
                tracer.flow_start(f"sample {group}.{member}.0")
        spent += time.perf_counter() - began
    began = time.perf_counter()
    tracer.close()
    merge_traces(run_dir)
    return (spent + time.perf_counter() - began) / (TRACED_CALLS * (1 + ARROWS))


def cpu_of_quickstart(steps: int, trace: bool, model: Path, run_dir: Path) -> float:
    """Returns the CPU seconds of a run and of all its processes."""
    flags = {"steps": steps, "telemetry.trace": str(trace).lower(), "model.name": model, "evaluate.prompts": ""}
    command = [sys.executable, "-m", "asyncrl.deploy.cli", "run", "quickstart", "--run-dir", str(run_dir)]
    command += [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    before = sum(os.times()[:4])
    run_program(command, {**os.environ}, QUICKSTART_DEADLINE)
    return sum(os.times()[:4]) - before
