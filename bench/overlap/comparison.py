"""`asyncrl-bench overlap RUN_DIR...` says how much the services of finished runs overlapped, and what held them up; of
several runs it compares each with the first. `asyncrl-bench overlap EXPERIMENT [--KEY VALUE]` runs the experiment
synchronous, one-step-off and at several limits, in turn, and says what asynchrony gains."""

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import log
from pathlib import Path
from statistics import fmean, median, pstdev

from asyncrl.bench.measurements import LOADED, MachineLoad, RoundValues, at_least, in_turn, table
from asyncrl.bench.overlap.accounting import Overlap, contention, overlap_of, overlap_yield, peak_flops, speedup
from asyncrl.bench.overlap.finished_runs import analyse, bottleneck
from asyncrl.bench.overlap.side_run import Side, SideRequest, run_side, side_config, sides_of
from asyncrl.bench.overlap.timed_services import LengthSpread, StageTimes
from asyncrl.config.schema import Config
from asyncrl.deploy.report.run_record import RunRecord, read_run
from asyncrl.deploy.report.worker_trace import read_trace
from asyncrl.engines.models.model_preparation import prepare
from asyncrl.errors import ConfigError

REFUSED = 3
"""Exit status where the machine was too busy for a speed-up."""
LENGTHS = ("mean", "sigma", "cap")
TIMES = tuple(each.name for each in fields(StageTimes) if each.name not in ("lengths", "slots", "update"))
Rounds = Mapping[str, Sequence[Overlap]]
"""The accounting of each round, by side."""
COMPUTING = ("generation", "training")


@dataclass(frozen=True, slots=True)
class Gains:
    """Holds what one side gained. speedups: over each baseline, by its name. overlap_yield: over the best of them.
    contention: of each computing stage, over its run alone with as many threads."""

    speedups: dict[str, RoundValues]
    overlap_yield: RoundValues
    contention: dict[str, RoundValues]


def best_baseline(sides: Sequence[Side], found: Rounds) -> str:
    """Returns the synchronous side with the highest rate."""
    rates = {side.name: RoundValues(tuple(each.tokens for each in found[side.name])) for side in sides}
    return max((side.name for side in sides if side.is_baseline), key=lambda name: rates[name].median)


def gains(name: str, sides: Sequence[Side], found: Rounds) -> Gains:
    """Compares a side with the baselines of the same round."""
    baselines = [side.name for side in sides if side.is_baseline]
    best = found[best_baseline(sides, found)]
    alone = found[baselines[0]]
    own = found[name]
    return Gains(
        {baseline: _speedups(found[baseline], own) for baseline in baselines},
        _rounds(
            overlap_yield(seconds(sync), seconds(run), max(work(solo).values()))
            for sync, run, solo in zip(best, own, alone, strict=True)
        ),
        {
            stage: _rounds(
                contention(work(run)[stage], work(solo)[stage]) for run, solo in zip(own, alone, strict=True)
            )
            for stage in COMPUTING
        },
    )


def _speedups(baseline: Sequence[Overlap], own: Sequence[Overlap]) -> RoundValues:
    return _rounds(speedup(seconds(sync), seconds(run)) for sync, run in zip(baseline, own, strict=True))


def _rounds(values: Iterable[float]) -> RoundValues:
    return RoundValues(tuple(values))


def seconds(run: Overlap) -> float:
    """Returns the seconds of a trained token, so that batches of different lengths compare."""
    return 1.0 / run.tokens


def work(run: Overlap) -> dict[str, float]:
    """Returns the busy seconds of each stage for a trained token."""
    return {stage: share / run.tokens for stage, share in run.stages.items()}


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


def stage_times(config: Config, typed: Sequence[str], run: Path | None) -> StageTimes:
    """Returns the times of emulated stages. typed: such as "token=0.01" and "sigma=1", over those of the run, or else
    over balanced stages. Raises ConfigError."""
    times = balanced(config) if run is None else calibrated(config, read_run(run), run)
    values = dict(_value(text) for text in typed)
    spread = {name: values.pop(name) for name in LENGTHS if name in values}
    lengths = replace(times.lengths, **spread)  # type: ignore[arg-type]
    return replace(times, **values, lengths=replace(lengths, cap=int(lengths.cap)))  # type: ignore[arg-type]


def balanced(config: Config) -> StageTimes:
    """Returns times of a made-up engine: reading weights takes 10 ms a token, the cache of a sample 60 us more, lengths
    are lognormal with sigma 1, and training takes as long as generation with all slots full."""
    token = 0.01
    each = 60e-6
    slots = config.generation.slots
    lengths = LengthSpread(config.generation.max_new_tokens / 4, 1.0, config.generation.max_new_tokens)
    return StageTimes(lengths, token, each, slots, trained_token=(token + each * slots) / slots)


def calibrated(config: Config, run: RunRecord, path: Path) -> StageTimes:
    """Returns the times of a run: its busy seconds, spread over what it sampled and trained."""
    found = overlap_of(run, read_trace(path / "logs"))
    tokens = found.tokens * found.step
    samples = config.task.prompts_per_step * config.task.samples_per_prompt
    busy = {stage: share * found.step for stage, share in found.stages.items()}
    sync = {service: shares["sync"] * found.step for service, shares in found.shares.items()}
    mean = fmean(step["completions/length_mean"] for step in run.steps)
    lengths = [log(max(1, sample.tokens)) for sample in run.samples]
    slots = min(config.generation.slots, samples)
    return StageTimes(
        lengths=LengthSpread(mean, pstdev(lengths) if lengths else 0.0, config.generation.max_new_tokens),
        token=busy["generation"] * slots / tokens,
        slots=config.generation.slots,
        load=sync["generation"],
        score=busy.get("reward", 0.0) / samples,
        reference=busy.get("reference", 0.0) / samples,
        trained_token=busy["training"] / tokens,
        publish=sync["training"],
    )


def _value(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in (*TIMES, *LENGTHS):
        raise ConfigError(f"--times {text}: there is no {name!r}; these are there: {', '.join((*LENGTHS, *TIMES))}")
    try:
        return name, float(value)
    except ValueError:
        raise ConfigError(f"--times {text}: write a number after {name}=") from None
