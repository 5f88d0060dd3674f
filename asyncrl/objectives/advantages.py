"""Advantages of the samples of one training batch, in float64, computed once at the cut."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

STD_EPSILON = 1e-4
"""Added to the standard deviation; the value that TRL divides by too, so that curves can be compared."""


@dataclass(frozen=True, slots=True)
class RewardedCut:
    """Members of one group that train together, and every reward known of that group.

    members: rising; rewards: by member, of these members and of others in the baseline.
    """

    group: int
    members: tuple[int, ...]
    rewards: Mapping[int, float]


Advantages: TypeAlias = Callable[[Sequence[RewardedCut], int], list[list[float]]]
"""(cuts of one batch, version it trains) -> for each cut the advantages of its members, in their order."""


def group_advantages(rewards: NDArray[np.float64], *, normalize_std: bool = False) -> NDArray[np.float64]:
    """A_i = r_i - mean(R), and divided by std(R) + 1e-4 on request; equal rewards give exactly 0.

    Args:
        rewards: float64 [R], R >= 2, all finite: every known reward of one group.
        normalize_std: divide by the standard deviation (ddof 1), as in DeepSeekMath (arXiv 2402.03300, section 4.1);
            without it the estimator is that of Dr. GRPO (arXiv 2503.20783, section 3.2).

    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    if len(rewards) < 2 or not np.all(np.isfinite(rewards)):
        raise ValueError(f"a group baseline needs at least two finite rewards, not {rewards.tolist()}")
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    scale = rewards.std(ddof=1) + STD_EPSILON if normalize_std else np.float64(1.0)
    advantages: NDArray[np.float64] = (rewards - rewards.mean()) / scale
    return advantages


@dataclass(frozen=True, slots=True)
class GroupBaseline:
    """Each sample against the mean of its group."""

    normalize_std: bool = False

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        return [self._of(cut) for cut in cuts]

    def _of(self, cut: RewardedCut) -> list[float]:
        order = sorted(cut.rewards)
        values = group_advantages(
            np.array([cut.rewards[m] for m in order], np.float64), normalize_std=self.normalize_std
        )
        by_member = dict(zip(order, values.tolist(), strict=True))
        return [by_member[member] for member in cut.members]


@dataclass(frozen=True, slots=True)
class Shuffled:
    """A control that must not learn: the same advantages, permuted over all samples of the batch.

    The permutation depends on seed and version only.
    """

    estimate: Advantages
    seed: int

    def __call__(self, cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        flat = np.array([a for members in self.estimate(cuts, version) for a in members], np.float64)
        mixed = iter(np.random.default_rng([self.seed, version]).permutation(flat).tolist())
        return [[next(mixed) for _ in cut.members] for cut in cuts]
