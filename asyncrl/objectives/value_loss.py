"""The critic's value loss and explained variance: pure functions on flat tensors [tokens]."""

from typing import TypeAlias

import torch
from torch import Tensor

Moments: TypeAlias = tuple[float, float, float]
"""Count, sum and sum of squares of some numbers."""
SAME = 1e-12
"""Returns with a smaller variance count as equal; rounding leaves about this much."""


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Computes 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); with clip 0 1/2 (V - R)^2.

    Source: PPO (arXiv 1707.06347, eq. 9); factor and clip come from OpenAI's program (`baselines`, ppo2). values: V,
    with gradient. old: V_old, the values that the advantages were computed with. returns: R = A + V_old. Returns the
    loss of each token, with gradient, and where the clipped value was further from the return, bool.
    """
    errors = (values - returns).square()
    if clip == 0:
        return errors / 2, torch.zeros_like(returns, dtype=torch.bool)
    clipped = (torch.clamp(values, old - clip, old + clip) - returns).square()
    return torch.maximum(errors, clipped) / 2, clipped > errors


def explained_variance(returns: Moments, errors: Moments) -> float:
    """Computes 1 - Var(R - V) / Var(R), and 0 when all returns are equal. errors: moments of R - V."""
    total, left = ((squares / count - (summed / count) ** 2) for count, summed, squares in (returns, errors))
    return 1.0 - left / total if total > SAME else 0.0
