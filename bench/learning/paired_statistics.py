"""What a handful of seeds tell: spreads, bounds on paired differences, how much of a loss was recovered. Pure.

Values of one side are given by seed: {0: 0.97, 1: 0.98}. Two sides are compared over the seeds that both have.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

T_95 = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 9: 1.860, 10: 1.833}
"""Student's t, one-sided 95 %, by number of values; ten values stand for all larger numbers, which is cautious."""

BySeed = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """deviation: of a sample (ddof 1), nan for a single seed."""

    seeds: int
    mean: float
    deviation: float
    lowest: float
    highest: float


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    deviation = stdev(values) if len(values) > 1 else math.nan
    return Spread(len(values), fmean(values), deviation, min(values), max(values))


def upper_bound(values: Sequence[float]) -> float:
    """One-sided 95 % bound on the mean (Student's t); inf for fewer than two values."""
    if len(values) < 2:
        return math.inf
    return fmean(values) + T_95[min(len(values), 10)] * stdev(values) / math.sqrt(len(values))


def differences(first: BySeed, second: BySeed) -> list[float]:
    """first - second, seed by seed, over the seeds that both have."""
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def recovered_share(synchronous: BySeed, uncorrected: BySeed, corrected: BySeed) -> float:
    """(corrected - uncorrected) / (synchronous - uncorrected), means over the seeds that all three have: 0 when the
    correction did nothing, 1 when it gave back all that was lost; nan when nothing was lost."""
    seeds = sorted(synchronous.keys() & uncorrected.keys() & corrected.keys())
    lost = sum(synchronous[seed] - uncorrected[seed] for seed in seeds)
    gained = sum(corrected[seed] - uncorrected[seed] for seed in seeds)
    return gained / lost if lost > 0 else math.nan


@dataclass(frozen=True, slots=True)
class Uncorrected:
    """A setting as seen without any correction: held-out rewards, synchronous and at the large limit, by seed."""

    setting: str
    synchronous: BySeed
    stale: BySeed


def chosen_setting(candidates: Sequence[Uncorrected], least_loss: float, least_reward: float) -> str | None:
    """The first candidate that learns when synchronous and loses enough when stale; None when there is none.

    Knows runs without a correction only, so that the correction cannot choose where it is looked at. Candidates stand
    in the order of preference that was written down before any of them was run.

    Args:
        least_loss: smallest mean of synchronous - stale.
        least_reward: smallest mean held-out reward of the synchronous runs.
    """
    for each in candidates:
        lost = differences(each.synchronous, each.stale)
        if lost and fmean(lost) >= least_loss and fmean(each.synchronous.values()) >= least_reward:
            return each.setting
    return None
