"""Advantages of the samples of one training batch, in float64, computed once at the cut."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STD_EPSILON = 1e-4
"""Added to the standard deviation; the value that TRL divides by too, so that curves can be compared."""


@dataclass(frozen=True, slots=True)
class RewardedCut:
    """Members of one group that train together, and every reward known of that group.

    members: rising; rewards: by member, of these members and of others in the baseline. tokens: sampled by each of
    these members, 0 of one that is left out of the loss. greedy: reward of the greedy answer, where there is one.
    """

    group: int
    members: tuple[int, ...]
    rewards: Mapping[int, float]
    tokens: Mapping[int, int] = field(default_factory=dict)
    greedy: float | None = None


Advantages: TypeAlias = Callable[[Sequence[RewardedCut], int], list[list[float]]]
"""(cuts of one batch, version it trains) -> for each cut the advantages of its members, in their order."""


def group_advantages(rewards: Floats, *, normalize_std: bool = False) -> Floats:
    """A_i = r_i - mean(R), and divided by std(R) + 1e-4 on request; equal rewards give exactly 0.

    Args:
        rewards: float64 [R], R >= 2, all finite: every known reward of one group.
        normalize_std: divide by the standard deviation (ddof 1), as in DeepSeekMath (arXiv 2402.03300, section 4.1);
            without it the estimator is that of Dr. GRPO (arXiv 2503.20783, section 3.2).

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
    """A_i = r_i - mean of the other rewards of the group; equal rewards give exactly 0.

    RLOO (arXiv 2402.14740, REINFORCE leave-one-out). rewards: as for `group_advantages`, which raises alike.
    """
    return group_advantages(rewards) * (len(rewards) / (len(rewards) - 1))


def batch_advantages(values: Floats, tokens: Floats) -> Floats:
    """(v_i - mean) / (std + 1e-4) over all tokens of the batch, each with the value of its sample.

    REINFORCE++ (arXiv 2501.03262, global advantage normalization): the statistics of the global batch in place of a
    group's. Every token of a sample has the same value, so a sample counts as often as it has tokens, in the mean and
    in the variance, which is divided by the number of tokens less one. Equal values give exactly 0.

    Args:
        values: float64 [samples], finite: rewards, or rewards less the mean of their group.
        tokens: float64 [samples]: sampled tokens of each; with 0 a sample is in no statistic.
    """
    if not np.all(np.isfinite(values)):
        raise ValueError(f"rewards of a batch are finite, not {values.tolist()}")
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
    """Each sample against the mean of its group."""

    normalize_std: bool = False

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        return [_of_group(cut, lambda r: group_advantages(r, normalize_std=self.normalize_std)) for cut in cuts]


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """Each sample against the mean of its siblings."""

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        return [_of_group(cut, leave_one_out_advantages) for cut in cuts]


def _of_group(cut: RewardedCut, estimate: Callable[[Floats], Floats]) -> list[float]:
    order = sorted(cut.rewards)
    values = estimate(np.array([cut.rewards[member] for member in order], np.float64))
    by_member = dict(zip(order, values.tolist(), strict=True))
    return [by_member[member] for member in cut.members]


@dataclass(frozen=True, slots=True)
class GreedyBaseline:
    """A_i = r_i - r(greedy answer of the same prompt): ReMax (arXiv 2310.10505, section 4, algorithm 1)."""

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        return [[cut.rewards[member] - _greedy(cut) for member in cut.members] for cut in cuts]


def _greedy(cut: RewardedCut) -> float:
    assert cut.greedy is not None, f"the gate cuts group {cut.group} once its greedy answer has a reward"
    return cut.greedy


@dataclass(frozen=True, slots=True)
class Rewards:
    """Each sample's own reward: with a critic, advantages of tokens are made of it where their rows are (`gae.py`)."""

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        return [[cut.rewards[member] for member in cut.members] for cut in cuts]


@dataclass(frozen=True, slots=True)
class BatchNormalized:
    """Rewards, or what `first` makes of them, against mean and standard deviation of the samples that train together.

    With GroupBaseline first it is the variant of the paper that is called REINFORCE++-baseline.
    """

    first: Advantages | None = None

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        before = self.first(cuts, version) if self.first else [[c.rewards[m] for m in c.members] for c in cuts]
        tokens = np.array([cut.tokens[member] for cut in cuts for member in cut.members], np.float64)
        values = batch_advantages(np.array([value for of_cut in before for value in of_cut], np.float64), tokens)
        return _split(values, cuts)


@dataclass(frozen=True, slots=True)
class Shuffled:
    """A control that must not learn: the same advantages, permuted over all samples of the batch.

    The permutation depends on seed and version only.
    """

    estimate: Advantages
    seed: int

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        flat = np.array([a for members in self.estimate(cuts, version) for a in members], np.float64)
        return _split(np.random.default_rng([self.seed, version]).permutation(flat), cuts)


def _split(values: Floats, cuts: Sequence[RewardedCut]) -> list[list[float]]:
    """Values of all samples, one list a cut."""
    flat = iter(values.tolist())
    return [[next(flat) for _ in cut.members] for cut in cuts]
