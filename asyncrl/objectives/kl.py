"""Estimators of KL(policy || reference) from the sampled tokens, each where it is right.

With d = log policy - log reference of the sampled token (J. Schulman, "Approximating KL divergence", 2020):
k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. What counts is the gradient (arXiv 2510.01555, 2512.21852):
k1 differentiated as a loss has zero expected gradient, so it only works as part of the reward; k2 as a loss
has the gradient of the KL itself for samples of the current policy; k3 as a loss approximates it with a bias.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """k1, k2 or k3 of each token; logprobs, reference and the result: [tokens]."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return (-difference).exp() - 1 + difference


def kl_loss(logprobs: Tensor, reference: Tensor, estimator: KlEstimator, weight: Tensor) -> Tensor:
    """KL loss of each token, times the detached weight that the policy's own term carries.

    weight: [tokens], 1 for samples of the current policy; older samples need it like the policy term does,
    or the gradient is that of a KL under the sampler's distribution. k1 is refused by the configuration.
    """
    assert estimator != "k1", "k1 as a loss has zero expected gradient"
    return weight.detach() * kl_estimate(logprobs, reference, estimator)


def kl_shaped_advantages(advantages: Tensor, logprobs: Tensor, reference: Tensor, coefficient: float) -> Tensor:
    """KL in the reward: A - coefficient x k1, token by token.

    The penalty is not centred by the group's baseline and each token bears its own k1 only, not that of the
    tokens after it: for samples of the current policy the gradient is that of k2 as a loss, but here it passes
    through ratio and clip together with the reward. logprobs: detached here, [tokens].
    """
    return advantages - coefficient * kl_estimate(logprobs.detach(), reference, "k1")


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
