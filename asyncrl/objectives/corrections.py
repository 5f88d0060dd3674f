"""Which policy the ratio is taken against, and what makes up for the difference to the one that sampled.

behaviour: the engine's policy when it sampled a token, with the log-probs that it recorded. proximal: the trainer's own
at the start of the step. current: the trainer's now. Log-probs are [tokens]; `log_weight` is proximal - behaviour,
detached: what lies between the two is staleness and the mismatch of engine and trainer.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.objectives.kl import kl_estimate
from asyncrl.objectives.rows import Rows

Level = Literal["token", "sequence"]
Rejection = Literal["geometric", "token_k2", "token_k3", "sequence_k2", "sequence_k3"]


@dataclass(frozen=True, slots=True)
class Importance:
    """log_ratio: carries the gradient, is clipped. weight: detached factor of the term, 0 where it is left out.

    Both [tokens].
    """

    log_ratio: Tensor
    weight: Tensor


def against_engine(current: Tensor, behaviour: Tensor) -> Importance:
    """Ratio current / behaviour, with the log-probs that the engine recorded while sampling, and no other weight.

    PPO's ratio (arXiv 1707.06347, eq. 6) taken against the policy that really sampled each token.
    """
    return Importance(current - behaviour, torch.ones_like(behaviour))


def against_proximal(current: Tensor, proximal: Tensor, weight: Tensor) -> Importance:
    """Ratio current / proximal; weight: what a function below made of proximal / behaviour, or ones.

    The decoupled objective (arXiv 2110.00641; for asynchronous training AReaL, arXiv 2505.24298).
    """
    return Importance(current - proximal.detach(), weight)


def leveled(log_weight: Tensor, level: Level, rows: Rows) -> Tensor:
    """log of the weight of each token: its own, or the sum over its row, the weight of the whole answer."""
    return log_weight if level == "token" else rows.spread(rows.sum(log_weight))


def capped_weight(log_weight: Tensor, cap: float) -> Tensor:
    """min(proximal / behaviour, cap): truncated importance sampling (IMPALA, arXiv 1802.01561, section 4.1)."""
    return log_weight.exp().clamp(max=cap)


def masked_weight(log_weight: Tensor, floor: float, cap: float) -> Tensor:
    """proximal / behaviour where it lies within [floor, cap], else 0.

    Per token: IcePop (Ring-1T, arXiv 2510.18855). Per sequence: masked importance sampling (Liu, Li et al., "When speed
    kills stability", 2025).
    """
    weight = log_weight.exp()
    return torch.where((weight >= floor) & (weight <= cap), weight, 0.0)


def accepted(log_weight: Tensor, rows: Rows, rejection: Rejection, low: float, high: float) -> Tensor:
    """bool [tokens]: those that are not rejected for how far behaviour and proximal are apart; no weight comes with it.

    geometric: the geometric mean over the row of proximal / behaviour lies within [low, high]. token_k2, token_k3,
    sequence_k2, sequence_k3: the estimate of KL(behaviour || proximal), of the token or as a mean over the row, is at
    most `high`. (Trust-region masking, "When speed kills stability", 2025.)
    """
    if rejection == "geometric":
        mean = rows.spread(rows.mean(log_weight)).exp()
        return (mean >= low) & (mean <= high)
    level, estimator = rejection.split("_")
    divergence = kl_estimate(-log_weight, torch.zeros_like(log_weight), "k2" if estimator == "k2" else "k3")
    return (divergence if level == "token" else rows.spread(rows.mean(divergence))) <= high


def effective_sample_share(total: float, squares: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2), Kish's effective sample size as a share of n: 1 when all weights are equal."""
    return total * total / (count * squares) if squares > 0 else 0.0
