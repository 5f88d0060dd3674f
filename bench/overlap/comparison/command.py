"""`asyncrl-bench overlap RUN_DIR...` says how much the services of finished runs overlapped, and what held them up; of
several runs it compares each with the first. `asyncrl-bench overlap EXPERIMENT [--KEY VALUE]` runs the experiment
synchronous, one-step-off and at several limits, in turn, and says what asynchrony gains."""

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from asyncrl.bench.measurements import LOADED, MachineLoad, RoundValues, at_least, in_turn, table
from asyncrl.bench.overlap.accounting import Overlap
from asyncrl.bench.overlap.bottleneck import bottleneck
from asyncrl.bench.overlap.calibration import stage_times
from asyncrl.bench.overlap.comparison.gains import Gains, Rounds, best_baseline, gains
from asyncrl.bench.overlap.comparison.side_run import SideRequest, run_side, side_config
from asyncrl.bench.overlap.comparison.sides import Side, sides_of
from asyncrl.bench.overlap.emulation.stage_times import StageTimes
from asyncrl.bench.overlap.model_flops import peak_flops
from asyncrl.bench.overlap.run_overlap import analyse
from asyncrl.engines.models.model_preparation import prepare
from asyncrl.errors import ConfigError

REFUSED = 3
"""Exit status where the machine was too busy for a speed-up."""


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench overlap", description=__doc__)
    parser.add_argument("what", nargs="+", metavar="RUN_DIR|EXPERIMENT", help="Name run directories, or an experiment.")
    parser.add_argument("--engine", choices=["real", "emulated", "virtual"], default="real")
    parser.add_argument("--limits", type=at_least(1), nargs="+", default=[1, 2, 4], help="of staleness")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--steps", type=at_least(8), default=30, help="of each run")
    parser.add_argument("--times", nargs="+", default=[], metavar="NAME=VALUE", help="of emulated stages, in seconds")
    parser.add_argument("--calibrate", type=Path, metavar="RUN_DIR", help="take times from this run")
    text = "of a run: also print loop MFU; a GPU by name (H100), or the FLOPs a second of one device"
    parser.add_argument("--peak", metavar="GPU|FLOPS", help=text)
    asked, flags = parser.parse_known_args(arguments)
    if len(asked.what) == 1 and not Path(asked.what[0]).is_dir():
        if asked.peak is not None:
            raise ConfigError("--peak is for run directories: name one, or several")
        sys.exit(compare(asked.what[0], flags, asked))
    if flags:
        raise ConfigError(f"{flags[0]}: keys of the config are for experiments, and {asked.what[0]} is a run")
    analyse([Path(path) for path in asked.what], None if asked.peak is None else peak_flops(asked.peak))


def compare(experiment: str, flags: Sequence[str], asked: argparse.Namespace) -> int:
    """Measures and prints; returns the exit status."""
    sides = sides_of(asked.engine, asked.limits)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        base = SideRequest(asked.engine, experiment, "", tuple(flags), {"steps": asked.steps})
        config = side_config(base)
        if asked.engine == "real":
            times = None  # The model is made once, because that is no part of a step.
            base.values["model.name"] = str(asyncio.run(prepare(config, Path(name) / "model", print)))
        else:
            times = stage_times(config, asked.times, asked.calibrate)
        requests = {side.name: partial(_run, base, side, times, Path(name), itertools.count()) for side in sides}
        load = MachineLoad()
        found = in_turn(requests, asked.rounds)
        others = load.others if asked.engine != "virtual" else 0.0
    print(f"{experiment}, engine {asked.engine}, {asked.steps} steps, {asked.rounds} rounds, sides in turn")
    refused = others > LOADED
    print("\n".join(page(sides, found, refused=refused)))
    if asked.engine != "virtual":
        print(f"  {load}")
    if refused:
        print(
            f"no speed-up: other processes used {others:.0%} of the machine's CPUs during the measurement, and over "
            f"{LOADED:.0%} a ratio of wall clock times says more of them than of the run; measure on an idle machine"
        )
    return REFUSED if refused else 0


def _run(base: SideRequest, side: Side, times: StageTimes | None, folder: Path, seeds: Iterator[int]) -> Overlap:
    """Runs a side once more, with the next seed: all sides of a round have the same."""
    run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    chosen = None if times is None else replace(times, update=side.update).options()
    values = {**base.values, **side.values, "seed": next(seeds)}
    return run_side(replace(base, run_dir=str(run_dir), values=values, times=chosen))


def page(sides: Sequence[Side], found: Rounds, *, refused: bool) -> Iterator[str]:
    """Yields the table, and the sentence about the fastest side."""
    own = {side.name: gains(side.name, sides, found) for side in sides}
    baselines = [side.name for side in sides if side.is_baseline]
    over = [] if refused else [f"over {name}" for name in baselines]
    head = ["", "s a step", "tokens/s", *over, *([] if refused else ["yield"]), "E", "bound E", "bubble", "fraction"]
    contended = "contention gen./train."
    yield table([*head, contended], [_row(side, found, own[side.name], refused=refused) for side in sides])
    best = best_baseline(sides, found)
    if not refused:
        yield f"  yield is over {best}, the fastest baseline; it is over 1 where full slots generate faster than alone"
    fastest = max(found, key=lambda name: median(each.tokens for each in found[name]))
    yield f"{fastest} is fastest: {bottleneck(found[fastest][-1])}"


def _row(side: Side, found: Rounds, own: Gains, *, refused: bool) -> list[str]:
    runs = found[side.name]
    gained = [] if refused else [str(each) for each in own.speedups.values()]
    if not refused:
        gained.append("-" if side.is_baseline else str(own.overlap_yield))
    return [
        side.name,
        str(RoundValues(tuple(each.step for each in runs))),
        str(RoundValues(tuple(each.tokens for each in runs))),
        *gained,
        f"{median(each.efficiency for each in runs):.3f}",
        _median([each.bound_efficiency for each in runs]),
        f"{median(each.bubble for each in runs):.1%}",
        _median([each.both_ran for each in runs]),
        " / ".join(f"{each.median:.2f}" for each in own.contention.values()),
    ]


def _median(values: Sequence[float | None]) -> str:
    known = [each for each in values if each is not None]
    return f"{median(known):.3f}" if known else "-"
