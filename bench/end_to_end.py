"""Trained tokens per second, end to end: ours beside TRL's synchronous GRPOTrainer and beside ours with asynchrony off.

All sides train the same model of three million random weights in float32 with the same optimizer, reward, batch of
64 x 8 samples, prescribed lengths and environment, no KL; in turn, so that what the machine does meanwhile hits all.
TRL runs as given (its defaults but for the precision) and at the best of a grid; ours at limit 2 and at limit 0, each
with one and with two ranks of the trainer. Ours are compared with ours of as many ranks, TRL with our fastest. TRL
needs an interpreter of its own: bench/peers/setup trl, or TRL_PYTHON.

The default looks at one workload once, in some six minutes; in full: --workload all --rounds 5 --search.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asyncrl.bench.figures import Load, Seen, in_turn, number, ratios, table, verdict
from asyncrl.bench.workloads import (
    AS_GIVEN,
    SAMPLES,
    Outcome,
    Own,
    TrlSettings,
    Workload,
    run_own,
    run_trl,
    trl_python,
    write_prompts,
)

LIMIT, WARM, TRL_WARM = 2, 3, 1
BEST = TrlSettings(threads=2, micro_batch=64)
GRID = [
    TrlSettings(threads, micro_batch, generations)
    for threads in (1, 2)
    for micro_batch in (32, 64, 128)
    for generations in (1, 2)
]
"""TRL pads a batch to its longest completion, whatever the micro-batch."""
OURS, OFF, GIVEN, TUNED = "asyncrl", "asyncrl, limit 0", "TRL as given", "TRL at its best"
OURS_TWO, OFF_TWO = "asyncrl, 2 ranks", "asyncrl, limit 0, 2 ranks"
STAGES = ("generation", "reward", "training")


def workloads(seats: int) -> dict[str, Workload]:
    from asyncrl.bench.lengths import equal, lognormal

    order = list(range(SAMPLES))
    random.Random(0).shuffle(order)
    same, tailed = tuple(equal(SAMPLES, 32)), tuple(lognormal(SAMPLES, 32, 1.0, 256, order))
    return {
        "equal": Workload("all completions 32 tokens", same, None, 1.4, 1.3),
        "lognormal": Workload("lognormal lengths (sigma 1, mean 32, cap 256)", tailed, None, 2.0, 1.7),
        "judge": Workload(f"a judge that takes 200 ms, {seats or 'all'} samples at a time", same, seats, 2.0, 1.7),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench end-to-end", description=__doc__)
    parser.add_argument("--workload", choices=["equal", "lognormal", "judge", "all"], default="equal")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="counted steps of TRL; ours takes twice as many")
    parser.add_argument("--seats", type=int, default=32, help="samples that the slow judge looks at together; 0: all")
    parser.add_argument("--search", action="store_true", help="find TRL's best settings on the grid first")
    parser.add_argument("--without-trl", action="store_true")
    asked = parser.parse_args(arguments)
    if not asked.without_trl and not trl_python().exists():
        raise SystemExit(f"{trl_python()} is not there; make it with: bench/peers/setup trl")
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = Path(name)
        make_model(folder / "model")
        write_prompts(folder)
        for key, workload in workloads(asked.seats).items():
            if asked.workload in (key, "all"):
                measure(workload, asked, folder)


def make_model(folder: Path) -> None:
    """In a process of its own: this one only waits, and loads no torch."""
    program = f"from asyncrl.bench.subject import *; make_subject(Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def measure(workload: Workload, asked: argparse.Namespace, folder: Path) -> None:
    load = Load()
    print(f"{workload.name}: {sum(workload.lengths):,} tokens a step, {asked.rounds} rounds", flush=True)
    best = BEST if not asked.search or asked.without_trl else search(workload, folder)
    sides: dict[str, Callable[[], Outcome]] = {
        OURS: lambda: run_own(Own(LIMIT), workload, 2 * asked.steps, WARM, folder),
        OURS_TWO: lambda: run_own(Own(LIMIT, ranks=2), workload, 2 * asked.steps, WARM, folder),
        OFF: lambda: run_own(Own(0), workload, 2 * asked.steps, WARM, folder),
        OFF_TWO: lambda: run_own(Own(0, ranks=2), workload, 2 * asked.steps, WARM, folder),
    }
    if not asked.without_trl:
        sides[TUNED] = lambda: run_trl(best, workload, asked.steps, TRL_WARM, folder)
        sides[GIVEN] = lambda: run_trl(AS_GIVEN, workload, asked.steps, TRL_WARM, folder)
    found = in_turn(sides, asked.rounds)
    print(f"  TRL at its best: {best}; as given: {AS_GIVEN}")
    report(workload, found)
    print(f"  {load}\n", flush=True)


def search(workload: Workload, folder: Path) -> TrlSettings:
    """The fastest of the grid, each tried over two steps."""
    found = {each: run_trl(each, workload, 2, TRL_WARM, folder) for each in GRID}
    ranked = sorted(found, key=lambda each: -found[each].rate)
    print(table(("TRL's grid", "tokens/s"), [(str(each), number(found[each].rate)) for each in ranked]))
    return ranked[0]


def report(workload: Workload, found: Mapping[str, Sequence[Outcome]]) -> None:
    rates = {name: Seen(tuple(each.rate for each in outcomes)) for name, outcomes in found.items()}
    rows = [(name, str(rates[name]), *_medians(outcomes)) for name, outcomes in found.items()]
    print(table(("", "trained tokens/s", "s a step", *(f"{stage}, s" for stage in STAGES), "reward"), rows))
    best = max((OURS, OURS_TWO), key=lambda name: rates[name].median)
    goals = {OFF: workload.over_synchronous, OFF_TWO: workload.over_synchronous, TUNED: workload.over_trl}
    for ours, other in ((OURS, OFF), (OURS_TWO, OFF_TWO), (best, TUNED), (best, GIVEN)):
        if other in found:
            ratio = ratios(rates[ours], rates[other])
            line = f"{ours} over {other} {ratio}"
            print(verdict(line, ratio.median, goals[other]) if other in goals else f"  {line}")
    explain(found)


def _medians(outcomes: Sequence[Outcome]) -> list[str]:
    stages = [Seen(tuple(each.stages[stage] for each in outcomes)).median for stage in STAGES]
    return [
        number(Seen(tuple(each.seconds for each in outcomes)).median),
        *(number(seconds) for seconds in stages),
        f"{outcomes[-1].reward:.3f}",
    ]


def explain(found: Mapping[str, Sequence[Outcome]]) -> None:
    """Engine and training step: seconds of the stages while nothing runs beside them; overlap is the rest."""

    def typical(name: str, stage: str) -> float:
        return Seen(tuple(each.stages[stage] for each in found[name])).median

    crowding = " and ".join(f"{stage} {typical(OURS, stage) / typical(OFF, stage):.2f}" for stage in STAGES[::2])
    print(f"  what running side by side costs each stage (times its seconds at limit 0): {crowding}")
    if TUNED in found:
        engine, step = (typical(TUNED, stage) / typical(OFF, stage) for stage in STAGES[::2])
        overlap = (
            Seen(tuple(each.rate for each in found[OURS])).median / Seen(tuple(each.rate for each in found[OFF])).median
        )
        print(f"  over TRL at its best: engine {engine:.2f}, training step {step:.2f}, overlap {overlap:.2f}")
