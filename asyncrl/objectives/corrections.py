"""Importance ratios, and corrections for the difference between the policy that sampled and the policy that trains.

Three policies have log-probs [tokens]: `behaviour`, the engine's when it sampled the token, as the engine recorded it;
`proximal`, the trainer's at the start of the step; `current`, the trainer's now. `log_weight` = proximal - behaviour,
without gradient, contains both staleness and the numerical mismatch of engine and trainer.
"""

from typing import Literal

import torch
from torch import Tensor

from asyncrl.objectives.kl import kl_estimate
from asyncrl.objectives.ragged import Ragged

Level = Literal["token", "sequence"]
Rejection = Literal["geometric", "token_k2", "token_k3", "sequence_k2", "sequence_k3"]


def weight_at_level(log_weight: Tensor, level: Level, ragged: Ragged) -> Tensor:
    """Returns the log weight per token, or for level "sequence" the sum over the row on each of its tokens."""
    return log_weight if level == "token" else ragged.spread(ragged.sum(log_weight))


def capped_weight(log_weight: Tensor, cap: float) -> Tensor:
    """Computes min(proximal / behaviour, cap), truncated importance sampling (IMPALA, arXiv 1802.01561)."""
    return log_weight.exp().clamp(max=cap)


def masked_weight(log_weight: Tensor, floor: float, cap: float) -> Tensor:
    """Returns proximal / behaviour where it is within [floor, cap], and 0 elsewhere.

    Sources: per token IcePop (Ring-1T, arXiv 2510.18855); per sequence masked importance sampling (Liu, Li et al.,
    "When speed kills stability", 2025).
    """
    weight = log_weight.exp()
    return torch.where((weight >= floor) & (weight <= cap), weight, 0.0)


def accepted(log_weight: Tensor, ragged: Ragged, rejection: Rejection, low: float, high: float) -> Tensor:
    """Returns which tokens pass a rejection test of the distance between behaviour and proximal, bool [tokens].

    geometric: the geometric mean of proximal / behaviour over the row is within [low, high]. token_k2, token_k3,
    sequence_k2, sequence_k3: the estimate of KL(behaviour || proximal), per token or as a mean over the row, is at
    most `high`. Source: trust-region masking ("When speed kills stability", 2025).
    """
    if rejection == "geometric":
        mean = ragged.spread(ragged.mean(log_weight)).exp()
        return (mean >= low) & (mean <= high)
    level, estimator = rejection.split("_")
    divergence = kl_estimate(-log_weight, torch.zeros_like(log_weight), "k2" if estimator == "k2" else "k3")
    return (divergence if level == "token" else ragged.spread(ragged.mean(divergence))) <= high


def effective_sample_share(total: float, squares: float, count: float) -> float:
    """Computes (sum w)^2 / (n sum w^2), Kish's effective sample size as a share of n; 1 when all weights are equal."""
    return total * total / (count * squares) if squares > 0 else 0.0
