"""The critic's loss: terms of the tokens, and where a bound holds them. Pure functions on flat tensors [tokens]."""

from dataclasses import dataclass

import torch
from torch import Tensor

SAME = 1e-12
"""Variance that rounding leaves of equal returns."""


@dataclass(frozen=True, slots=True)
class ValueLosses:
    """terms: to be minimized, with gradient [tokens]. held: bool [tokens], where the clipped value was further off."""

    terms: Tensor
    held: Tensor


def value_loss(values: Tensor, judged: Tensor, returns: Tensor, clip: float) -> ValueLosses:
    """1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); clip 0: 1/2 (V - R)^2.

    The squared error of PPO (arXiv 1707.06347, eq. 9). Half of it, and the clip around the value that the returns were
    made with, are not in the paper but in OpenAI's program (`baselines`, ppo2), and in those that followed it.
    values: with gradient. judged: V_old. returns: R, the advantages made with V_old, added to it.
    """
    errors = (values - returns).square()
    if clip == 0:
        return ValueLosses(errors / 2, torch.zeros_like(returns, dtype=torch.bool))
    clipped = (torch.clamp(values, judged - clip, judged + clip) - returns).square()
    return ValueLosses(torch.maximum(errors, clipped) / 2, clipped > errors)


@dataclass(frozen=True, slots=True)
class Moments:
    """Of some numbers: how many, their sum, the sum of their squares."""

    count: float
    total: float
    squares: float

    @property
    def variance(self) -> float:
        return self.squares / self.count - (self.total / self.count) ** 2


def explained_variance(returns: Moments, errors: Moments) -> float:
    """1 - Var(R - V) / Var(R); 0 when all returns are equal. errors: R - V."""
    return 1.0 - errors.variance / returns.variance if returns.variance > SAME else 0.0
