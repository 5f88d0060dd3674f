"""The clipped policy objective and the three ways to average it. Pure functions on flat tensors [tokens]."""

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def clipped_policy_loss(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Loss of each token: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(log_ratio).

    The group-relative objective of DeepSeekMath (arXiv 2402.03300, eq. 3) over PPO's clipped surrogate
    (arXiv 1707.06347, eq. 7), with separate bounds below and above (DAPO, arXiv 2503.14476, section 3.1).
    log_ratio, advantages: [tokens]; returns [tokens].
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clip_binds(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """bool [tokens]: where the clip removes the gradient."""
    above = (ratio > 1 + clip_high) & (advantages > 0)
    below = (ratio < 1 - clip_low) & (advantages < 0)
    return above | below


def row_weights(aggregation: Aggregation, lengths: Tensor, tokens: int, samples: int, constant: int) -> Tensor:
    """What one token of each row counts in the loss: the loss of an optimizer step is the plain sum of
    weight x term over its live tokens, on all ranks and in all micro-batches.

    token_mean: 1 / tokens (DAPO, section 3.3). sequence_mean: 1 / (samples x length), GRPO's original average
    (arXiv 2402.03300, eq. 3). constant: 1 / (samples x constant), Dr.GRPO (arXiv 2503.20783, section 3.2).
    lengths: response tokens of each row [rows], masked ones included, so that masking a token removes its
    term and never changes the weight of another. tokens, samples: of the whole step. Returns float32 [rows].
    """
    if aggregation == "token_mean":
        return torch.full(lengths.shape, 1.0 / tokens, device=lengths.device)
    if aggregation == "sequence_mean":
        return 1.0 / (samples * lengths.to(torch.float32))
    return torch.full(lengths.shape, 1.0 / (samples * constant), device=lengths.device)
