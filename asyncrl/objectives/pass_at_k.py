"""Estimates how likely one of several samples is right, with an interval over the problems."""

from collections.abc import Sequence
from math import comb, sqrt
from statistics import fmean
from typing import NamedTuple

Z = 1.959964
"""Quantile of the normal distribution for intervals of 95 %."""


class Rate(NamedTuple):
    """An estimate in 0 to 1 with its interval of 95 %."""

    mean: float
    low: float
    high: float


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Returns the unbiased estimate of pass@k from `samples` >= k samples of one problem, of which `passed` passed:
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, section 2.1)."""
    assert 0 <= passed <= samples
    assert 1 <= k <= samples
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def rate_over(problems: Sequence[float]) -> Rate:
    """Returns the mean of values in 0 to 1, one a problem, with Wilson's interval (Wilson 1927; Brown, Cai and DasGupta
    2001). Values between 0 and 1 vary less than the coin flips it is made for, so that it is rather too wide; it does
    not vanish where all problems are alike."""
    mean, count = fmean(problems), len(problems)
    middle = (mean + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z * sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count)) / (1 + Z * Z / count)
    return Rate(mean, max(0.0, middle - half), min(1.0, middle + half))
