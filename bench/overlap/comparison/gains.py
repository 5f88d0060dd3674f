"""Computes what asynchrony gained over named synchronous baselines, round by round; pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.bench.measurements import RoundValues
from asyncrl.bench.overlap.accounting import Overlap
from asyncrl.bench.overlap.comparison.sides import Side
from asyncrl.bench.overlap.definitions import contention, overlap_yield, speedup

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
    best, alone = found[best_baseline(sides, found)], found[baselines[0]]
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
