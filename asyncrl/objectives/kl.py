"""Estimators of KL(policy || reference) from the sampled tokens, each where it is right.

With d = log policy - log reference of the sampled token (J. Schulman, "Approximating KL divergence", 2020):
k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. What counts is the gradient (arXiv 2510.01555, 2512.21852):
k1 differentiated as a loss has zero expected gradient, so it only works as part of the reward; k2 as a loss
has the gradient of the KL itself for samples of the current policy; k3 as a loss approximates it with a bias.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

FAR = 20.0
"""Nats by which k3 takes the reference to be above the policy at most: exp(FAR) is 5e8, and float32 ends at exp(88)."""


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """k1, k2 or k3 of each token; logprobs, reference and the result: [tokens]. k3's exponent is held under FAR."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return (-difference).clamp(max=FAR).exp() - 1 + difference


def kl_loss(logprobs: Tensor, reference: Tensor, estimator: KlEstimator, weight: Tensor) -> Tensor:
    """KL loss of each token, times the detached weight that the policy's own term carries.

    weight: [tokens], 1 for samples of the current policy; older samples need it like the policy term does,
    or the gradient is that of a KL under the sampler's distribution. k1 is refused by the configuration.
    """
    assert estimator != "k1", "k1 as a loss has zero expected gradient"
    return weight.detach() * kl_estimate(logprobs, reference, estimator)


def kl_to_go(logprobs: NDArray[np.float32], reference: NDArray[np.float32]) -> NDArray[np.float64]:
    """The sum of k1 from each token of an answer to its last: float64 [tokens].

    With KL in the reward a token's advantage is A - beta x this, as in REINFORCE++ (arXiv 2501.03262): what a token
    does to the KL of later ones is its own doing. The expected gradient is that of the KL of whole answers, which a
    token's own k1 misses. logprobs: of the policy that sampled, so that the penalty is known for good, as any reward.
    """
    k1 = logprobs.astype(np.float64) - reference
    return np.cumsum(k1[::-1])[::-1].copy()


PROPORTIONAL_ERROR = 0.2
GAIN = 0.1
"""Both as in the paper."""


@dataclass(slots=True)
class KlCoefficient:
    """The factor of the KL term, fixed or held by a controller. target: nats per token, None for a fixed one."""

    value: float
    target: float | None = None

    def update(self, measured: float) -> None:
        """After a training iteration in which the mean KL per token was `measured`.

        beta <- beta (1 + 0.1 clip(measured / target - 1, -0.2, 0.2)): the log-space proportional controller of Ziegler
        et al. (arXiv 1909.08593, section 2.2), whose KL is that of a whole answer.
        """
        if self.target is not None:
            error = min(PROPORTIONAL_ERROR, max(-PROPORTIONAL_ERROR, measured / self.target - 1))
            self.value *= 1 + GAIN * error
