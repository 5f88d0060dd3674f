"""Compares a few seeds: spreads, bounds on paired differences, and the share of a loss that was recovered.

The values of a side are given by seed: {0: 0.97, 1: 0.98}. Two sides are compared over the seeds of both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

T_95 = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 9: 1.860, 10: 1.833}
"""Student's t, one-sided 95 %, by number of values. The entry for ten serves all larger numbers, which is cautious."""

BySeed = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """Describes values of several seeds. deviation: with ddof 1, nan for a single seed."""

    seeds: int
    mean: float
    deviation: float
    lowest: float
    highest: float


def spread(values: Sequence[float]) -> Spread:
    """Describes at least one value."""
    deviation = stdev(values) if len(values) > 1 else math.nan
    return Spread(len(values), fmean(values), deviation, min(values), max(values))


def upper_bound(values: Sequence[float]) -> float:
    """Returns the one-sided upper 95 % bound on the mean (Student's t); inf for fewer than two values."""
    if len(values) < 2:
        return math.inf
    return fmean(values) + T_95[min(len(values), 10)] * stdev(values) / math.sqrt(len(values))


def differences(first: BySeed, second: BySeed) -> list[float]:
    """Returns first - second, seed by seed, over the seeds of both."""
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def recovered_share(synchronous: BySeed, uncorrected: BySeed, corrected: BySeed) -> float:
    """Returns (corrected - uncorrected) / (synchronous - uncorrected), means over the seeds of all three.

    0: the correction had no effect; 1: it recovered the whole loss; nan: there was no loss.
    """
    seeds = sorted(synchronous.keys() & uncorrected.keys() & corrected.keys())
    lost = sum(synchronous[seed] - uncorrected[seed] for seed in seeds)
    gained = sum(corrected[seed] - uncorrected[seed] for seed in seeds)
    return gained / lost if lost > 0 else math.nan
