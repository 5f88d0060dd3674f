"""M2PO's trust region (arXiv 2510.01161): a bound on the second moment of the log ratios of a whole update.

Only tokens that the update would push further from the sampler can be left out: ratio above 1 with a positive
advantage, below 1 with a negative one. Of these the largest squared log ratios go, until the mean of the others is
within the budget. The authors' program caps the squares in that mean where the paper leaves them out, and so keeps
fewer tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Element-wise over all ranks."""

HALVINGS = 60
"""Of the interval that holds the bound: more than float64 can tell apart."""


def pushed_away(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """bool [tokens]: tokens that the update moves further from the policy that sampled them."""
    return log_ratio * advantages > 0


def second_moment_bound(squares: Tensor, budget: float, total: Reduce, largest: Reduce) -> float:
    """The bound up to which squared log ratios are kept, so that their mean is at most `budget`.

    squares: float64 [n], those of the tokens `pushed_away` on this rank. Found by halving, so that ranks exchange two
    numbers a turn; answers midway between the largest that is kept and the smallest that is not, infinity when all are.
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
    """The largest on any rank."""
    own = float(values.max()) if len(values) else none
    return float(largest(torch.tensor([own], dtype=torch.float64)).item())
