"""Which policy the ratio is taken against, and the weight that makes up for the difference to the sampler's."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Importance:
    """log_ratio: carries the gradient, is clipped. weight: detached factor of the clipped term. Both [tokens]."""

    log_ratio: Tensor
    weight: Tensor


def against_engine(current: Tensor, behaviour: Tensor) -> Importance:
    """Ratio current / behaviour, with the log-probs that the engine recorded while sampling, and no other weight.

    PPO's ratio (arXiv 1707.06347, eq. 6) taken against the policy that really sampled each token.
    """
    return Importance(current - behaviour, torch.ones_like(behaviour))


def against_proximal(current: Tensor, proximal: Tensor, behaviour: Tensor, cap: float) -> Importance:
    """Ratio current / proximal; weight min(proximal / behaviour, cap), detached.

    The decoupled objective (arXiv 2110.00641; for asynchronous training AReaL, arXiv 2505.24298) with the
    importance weight capped as in IMPALA (arXiv 1802.01561, section 4.1). proximal: the trainer's own log-probs
    [tokens] at the start of the step.
    """
    proximal = proximal.detach()
    weight = (proximal - behaviour).exp().clamp(max=cap)
    return Importance(current - proximal, weight)


def effective_sample_share(total: float, squares: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2), Kish's effective sample size as a share of n: 1 when all weights are equal."""
    return total * total / (count * squares) if squares > 0 else 0.0
