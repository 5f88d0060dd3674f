"""Advantage estimators for the samples of one training batch; computed in float64, once, when the batch is cut."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STD_EPSILON = 1e-4
"""Added to the standard deviation. TRL uses the same value, so that learning curves can be compared."""


@dataclass(frozen=True, slots=True)
class RewardedCut:
    """Holds the members of one group that train together and every known reward of the group.

    members: in rising order. rewards: by member; includes members that only enter the baseline. tokens: number of
    sampled tokens by member, 0 for a member that is left out of the loss. greedy: reward of the greedy answer, if the
    algorithm samples one.
    """

    group: int
    members: tuple[int, ...]
    rewards: Mapping[int, float]
    tokens: Mapping[int, int] = field(default_factory=dict)
    greedy: float | None = None


Advantages: TypeAlias = Callable[[Sequence[RewardedCut], int], list[list[float]]]
"""An estimator: maps the cuts of one batch and the version that they train to one list of advantages per cut, in the
order of the members."""


def group_advantages(rewards: Floats, *, normalize_std: bool = False) -> Floats:
    """Computes A_i = r_i - mean(R), optionally divided by std(R) + 1e-4; equal rewards give exactly 0.

    Args:
        rewards: float64 [R], R >= 2, all finite: every known reward of one group.
        normalize_std: divide by the standard deviation (ddof 1), as in DeepSeekMath (arXiv 2402.03300, section 4.1).
            Without the division the estimator is that of Dr. GRPO (arXiv 2503.20783, section 3.2).

    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    _check_group(rewards)
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    scale = rewards.std(ddof=1) + STD_EPSILON if normalize_std else np.float64(1.0)
    advantages: Floats = (rewards - rewards.mean()) / scale
    return advantages


def leave_one_out_advantages(rewards: Floats) -> Floats:
    """Computes A_i = r_i - mean of the other rewards of the group; equal rewards give exactly 0.

    Source: RLOO (arXiv 2402.14740, REINFORCE leave-one-out). Takes and raises what `group_advantages` does.
    """
    return group_advantages(rewards) * (len(rewards) / (len(rewards) - 1))


def batch_advantages(values: Floats, tokens: Floats) -> Floats:
    """Computes (v_i - mean) / (std + 1e-4), where mean and std run over all tokens of the batch.

    Source: REINFORCE++ (arXiv 2501.03262, global advantage normalization), which uses the statistics of the global
    batch instead of the group's. All tokens of a sample have the value of the sample, so a sample counts once per
    token; the variance is divided by the number of tokens minus one. Equal values give exactly 0.

    Args:
        values: float64 [samples], finite: rewards, or rewards minus the mean of their group.
        tokens: float64 [samples]: number of sampled tokens; a sample with 0 tokens is excluded from mean and std.

    Raises:
        ValueError: a value is not finite.
    """
    if not np.all(np.isfinite(values)):
        raise ValueError(f"the rewards of a batch must be finite, not {values.tolist()}")
    counted = values[tokens > 0]
    if not len(counted) or counted.max() == counted.min():
        return np.zeros_like(values)
    centred = values - np.average(values, weights=tokens)
    std = np.sqrt((tokens * centred**2).sum() / (tokens.sum() - 1))
    advantages: Floats = centred / (std + STD_EPSILON)
    return advantages


def _check_group(rewards: Floats) -> None:
    if len(rewards) < 2 or not np.all(np.isfinite(rewards)):
        raise ValueError(f"a group baseline needs at least two finite rewards, not {rewards.tolist()}")


@dataclass(frozen=True, slots=True)
class GroupBaseline:
    """Compares each sample with the mean of its group."""

    normalize_std: bool = False

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        return [_of_group(cut, lambda r: group_advantages(r, normalize_std=self.normalize_std)) for cut in cuts]


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """Compares each sample with the mean of the other samples of its group."""

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        return [_of_group(cut, leave_one_out_advantages) for cut in cuts]


def _of_group(cut: RewardedCut, estimate: Callable[[Floats], Floats]) -> list[float]:
    order = sorted(cut.rewards)
    values = estimate(np.array([cut.rewards[member] for member in order], np.float64))
    by_member = dict(zip(order, values.tolist(), strict=True))
    return [by_member[member] for member in cut.members]


@dataclass(frozen=True, slots=True)
class GreedyBaseline:
    """Computes A_i = r_i - r(greedy answer to the same prompt). Source: ReMax (arXiv 2310.10505, algorithm 1)."""

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        return [[cut.rewards[member] - _greedy(cut) for member in cut.members] for cut in cuts]


def _greedy(cut: RewardedCut) -> float:
    assert cut.greedy is not None, f"group {cut.group} was cut before its greedy answer had a reward"
    return cut.greedy


@dataclass(frozen=True, slots=True)
class Rewards:
    """Passes the rewards on; with a critic the trainer computes token advantages from them (`gae.py`)."""

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        return [[cut.rewards[member] for member in cut.members] for cut in cuts]


@dataclass(frozen=True, slots=True)
class BatchNormalized:
    """Normalizes rewards, or the advantages of `first`, by mean and standard deviation over the whole batch.

    With `first = GroupBaseline()` this is REINFORCE++-baseline (arXiv 2501.03262).
    """

    first: Advantages | None = None

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        before = self.first(cuts, version) if self.first else [[c.rewards[m] for m in c.members] for c in cuts]
        tokens = np.array([cut.tokens[member] for cut in cuts for member in cut.members], np.float64)
        values = batch_advantages(np.array([value for of_cut in before for value in of_cut], np.float64), tokens)
        return _split(values, cuts)


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Permutes the advantages of `estimate` over the batch: a control experiment that must not learn.

    The permutation depends only on seed and version.
    """

    estimate: Advantages
    seed: int

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        flat = np.array([a for members in self.estimate(cuts, version) for a in members], np.float64)
        return _split(np.random.default_rng([self.seed, version]).permutation(flat), cuts)


def _split(values: Floats, cuts: Sequence[RewardedCut]) -> list[list[float]]:
    """Splits the values of all samples into one list per cut."""
    flat = iter(values.tolist())
    return [[next(flat) for _ in cut.members] for cut in cuts]
