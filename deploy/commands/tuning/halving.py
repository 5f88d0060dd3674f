"""Sequential halving: all candidates get few steps, the better ones more of them, and the last ones all.

    candidates 9 ──> 3 ──> 1        steps of each 28 ──> 84 ──> 250        (keep one in 3)

Each rung costs about as many steps as the others (Jamieson and Talwalkar, Non-stochastic best arm identification and
hyperparameter optimization, AISTATS 2016, figure 1; Karnin et al., ICML 2013, with a share of 1/2). Candidates are
compared in pairs: the score of a seed minus that of the experiment's own values with the same seed and as many steps.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from asyncrl.telemetry.jsonl import Object

SHARE = 4
"""A score is the mean of the last fourth of the steps."""


class Rung(NamedTuple):
    """A round of runs. steps: that each candidate has trained at its end; candidates: that begin it."""

    steps: int
    candidates: int


def rungs(candidates: int, keep: int, steps: int) -> list[Rung]:
    """Returns the rungs for a number of candidates, of which one in `keep` goes on, up to so many steps."""
    counts = [candidates]
    while counts[-1] >= keep:
        counts.append(counts[-1] // keep)
    last = len(counts) - 1
    return [Rung(max(1, math.ceil(steps / keep ** (last - number))), count) for number, count in enumerate(counts)]


def score(lines: Sequence[Object], metric: str, steps: int) -> float | None:
    """Returns the mean of a metric over the last fourth of the first `steps` steps; None where a run has not trained
    them, does not report the metric in them, or reports no finite number."""
    if not lines or int(lines[-1]["step"]) < steps:
        return None
    first = steps - math.ceil(steps / SHARE) + 1
    found = [line.get(metric) for line in lines if first <= line["step"] <= steps]
    numbers = [float(number) for number in found if number is not None]
    mean = fmean(numbers) if numbers else math.nan
    return mean if math.isfinite(mean) else None


class PairedDifference(NamedTuple):
    """A mean over seeds, with its standard error; None with one seed."""

    mean: float
    error: float | None

    @property
    def is_clear(self) -> bool:
        """Checks whether the mean is over twice its standard error above zero."""
        return self.error is not None and self.mean > 2 * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.4g}" + ("" if self.error is None else f" ± {self.error:.2g}")


def paired(scores: Mapping[int, float], own: Mapping[int, float], sign: int = 1) -> PairedDifference | None:
    """Returns by how much scores are better than those of the experiment's own values, over the seeds that both have;
    None without one. sign: -1 where less is better."""
    differences = [sign * (scores[seed] - own[seed]) for seed in scores if seed in own]
    if not differences:
        return None
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return PairedDifference(fmean(differences), error)
