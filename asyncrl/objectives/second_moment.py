"""M2PO's trust region (arXiv 2510.01161): a bound on the second moment of the log ratios of a whole update.

Only tokens that the update would push further from the policy that sampled can be left out: a ratio above 1 with a
positive advantage, or below 1 with a negative one. Among these, the tokens with the largest squared log ratios are left
out until the mean of the remaining squares is within the budget. The authors' program caps the squares in that mean
where the paper leaves them out, and therefore keeps fewer tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""An element-wise reduction over all ranks."""

HALVINGS = 60
"""Bisection steps: 60 halvings reach the resolution of float64."""


def pushed_away(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Returns which tokens the update moves further from the policy that sampled them, bool [tokens]."""
    return log_ratio * advantages > 0


def second_moment_bound(squares: Tensor, budget: float, total: Reduce, largest: Reduce) -> float:
    """Returns the bound up to which squared log ratios are kept, so that their mean is at most `budget`.

    squares: float64 [n], of the tokens `pushed_away` on this rank. total, largest: sum and maximum over all ranks. The
    bound is found by bisection, in which ranks exchange two numbers per step. It lies midway between the largest kept
    and the smallest dropped square, and is infinity when all are kept.
    """

    def fits(bound: float) -> bool:
        kept = squares[squares <= bound]
        added, count = total(torch.tensor([float(kept.sum()), float(len(kept))], dtype=torch.float64)).tolist()
        return bool(added <= budget * count)

    high = _peak(squares, largest)
    if fits(high):
        return float("inf")
    low = 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    kept, left_out = _peak(squares[squares <= low], largest), -_peak(-squares[squares > low], largest, -torch.inf)
    return (kept + left_out) / 2


def _peak(values: Tensor, largest: Reduce, none: float = 0.0) -> float:
    """Returns the largest value on any rank."""
    own = float(values.max()) if len(values) else none
    return float(largest(torch.tensor([own], dtype=torch.float64)).item())
