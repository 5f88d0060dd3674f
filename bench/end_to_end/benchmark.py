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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from asyncrl.bench.end_to_end.compared_systems import (
    STAGES,
    TRL_DEFAULTS,
    SideResult,
    TrlSettings,
    run_asyncrl,
    run_trl,
    trl_python,
)
from asyncrl.bench.end_to_end.workload import Workload, workloads, write_prompts
from asyncrl.bench.measurements import MachineLoad, at_least, goal_line, in_turn, number, ratios, round_values, table

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
        module = "asyncrl.bench.end_to_end.benchmark_model"
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
