"""Estimates how likely one of several samples is right, and means, with intervals over problems or episodes."""

from collections.abc import Sequence
from math import comb, nan, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

Z = 1.959964
"""Quantile of the normal distribution for intervals of 95 %."""

LEAST = 3
"""Fewest values that show how much they vary."""


class Rate(NamedTuple):
    """An estimate with its interval of 95 %."""

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
    mean = fmean(problems)
    count = len(problems)
    middle = (mean + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z * sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count)) / (1 + Z * Z / count)
    return Rate(mean, max(0.0, middle - half), min(1.0, middle + half))


def mean_with_interval(values: Sequence[float]) -> Rate:
    """Returns the mean of values with Student's interval; there is none of fewer than three values."""
    mean = fmean(values)
    count = len(values)
    if count < LEAST:
        return Rate(mean, nan, nan)
    half = student_quantile(count - 1) * stdev(values) / sqrt(count)
    return Rate(mean, mean - half, mean + half)


def student_quantile(freedom: int) -> float:
    """Returns the quantile of Student's distribution for intervals of 95 %, by its expansion in 1 / degrees of freedom
    (Abramowitz and Stegun 1964, 26.7.5): within 1 % of it from 3 degrees on, and 4 % for 2."""
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3
