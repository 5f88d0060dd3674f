"""Estimators of KL(policy || reference) from sampled tokens, and the coefficient of a KL loss.

With d = log policy - log reference of the sampled token (J. Schulman, "Approximating KL divergence", 2020):
k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. Their gradients differ (arXiv 2510.01555, 2512.21852): k1 as a loss has zero
expected gradient, so it is used only inside the reward; k2 as a loss has the gradient of the KL for samples of the
current policy; k3 as a loss approximates that gradient with a bias.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

FAR = 20.0
"""Largest exponent of k3, in nats: exp(FAR) is 5e8, while float32 overflows at exp(88)."""


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """Computes k1, k2 or k3 per token; all tensors are [tokens]. The exponent of k3 is clamped to FAR."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return (-difference).clamp(max=FAR).exp() - 1 + difference


def kl_loss(logprobs: Tensor, reference: Tensor, estimator: KlEstimator, weight: Tensor) -> Tensor:
    """Computes the KL loss of each token, multiplied by the detached weight of the policy loss.

    weight: [tokens], 1 for samples of the current policy; without it older samples would give the gradient of a KL
    under the sampler's distribution.
    """
    assert estimator != "k1", "k1 as a loss has zero expected gradient"
    return weight.detach() * kl_estimate(logprobs, reference, estimator)


def kl_to_go(logprobs: NDArray[np.float32], reference: NDArray[np.float32]) -> NDArray[np.float64]:
    """Sums k1 from each token of an answer to its last token; float64 [tokens].

    With the KL in the reward a token's advantage is A - beta x this sum (REINFORCE++, arXiv 2501.03262), because a
    token also changes the KL of the tokens after it. The expected gradient is then that of the KL of whole answers;
    k1 of the single token would miss part of it. logprobs: of the policy that sampled, so the penalty is constant.
    """
    k1 = logprobs.astype(np.float64) - reference
    return np.cumsum(k1[::-1])[::-1].copy()


@dataclass(slots=True)
class KlCoefficient:
    """Holds the coefficient of the KL loss. target: KL to hold, in nats per token; None keeps the value fixed."""

    value: float
    target: float | None = None

    def update(self, measured: float) -> None:
        """Adapts the coefficient after a training iteration whose mean KL per token was `measured`.

        beta <- beta (1 + 0.1 clip(measured / target - 1, -0.2, 0.2)): the log-space proportional controller of Ziegler
        et al. (arXiv 1909.08593, section 2.2), who measure the KL of whole answers.
        """
        if self.target is not None:
            error = min(0.2, max(-0.2, measured / self.target - 1))
            self.value *= 1 + 0.1 * error
