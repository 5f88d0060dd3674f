"""Distributions of actions: categorical, and a Gaussian that tanh squashes into a box.

Log-probs and entropies are of whole actions, in nats, [states]. A stored action is what the policy sampled: the index
of a discrete action, or the vector before tanh, from which log-probs can be computed again without rounding at the
borders of the box.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.engines.acting.stepping.spaces import ActionSpace

LEAST_LOG_STD, MOST_LOG_STD = -20.0, 2.0
"""Bounds of the logarithm of the standard deviation, as in the authors' program of SAC (arXiv 1812.05905)."""
QUADRATURE_NODES, QUADRATURE_END = 96, 5.5
"""Nodes of the trapezoidal rule of an entropy, over so many standard deviations to both sides. Its error is below 1e-5
nats, and 1e-4 in the derivative by the logarithm of the standard deviation, for all that the bounds above allow: a
Gauss-Hermite quadrature of as many nodes converges slowly where tanh has its kink within a wide Gaussian."""


class ActionDistribution(Protocol):
    """A policy samples from it in some states."""

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Returns stored actions [states, stored], without gradient."""
        ...

    def mode(self) -> Tensor:
        """Returns the stored actions of a policy that does not explore."""
        ...

    def logprobs(self, stored: Tensor) -> Tensor:
        """Returns the log-probs of stored actions, with gradient."""
        ...

    def entropy(self) -> Tensor:
        """Returns the entropies, with gradient."""
        ...


@dataclass(frozen=True, slots=True)
class CategoricalActions:
    """Chooses one of the actions of a discrete space. logits: [states, actions]."""

    logits: Tensor

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            return torch.multinomial(self.logits.softmax(-1), 1, generator=generator).to(self.logits.dtype)

    def mode(self) -> Tensor:
        return self.logits.argmax(-1, keepdim=True).to(self.logits.dtype)

    def logprobs(self, stored: Tensor) -> Tensor:
        return self.logits.log_softmax(-1).gather(-1, stored.long()).squeeze(-1)

    def entropy(self) -> Tensor:
        logprobs = self.logits.log_softmax(-1)
        return -(logprobs.exp() * logprobs).sum(-1)


@dataclass(frozen=True, slots=True)
class SquashedGaussian:
    """Actions low + (tanh(u) + 1) / 2 (high - low) with u ~ N(mean, exp(log_std)), all [states, size].

    Source: SAC (arXiv 1812.05905, appendix C): log pi(a) = log N(u) - sum log(1 - tanh^2 u), here also minus the
    logarithm of the half widths of the box. width: sum of these logarithms.
    """

    mean: Tensor
    log_std: Tensor
    width: float = 0.0

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            return self.with_gradient(generator)

    def with_gradient(self, generator: torch.Generator | None = None) -> Tensor:
        """Returns samples u through which gradients reach mean and standard deviation."""
        noise = torch.empty_like(self.mean).normal_(generator=generator)
        return self.mean + self.log_std.exp() * noise

    def mode(self) -> Tensor:
        return self.mean

    def logprobs(self, stored: Tensor) -> Tensor:
        return self.unit_logprobs(stored) - self.width

    def unit_logprobs(self, stored: Tensor) -> Tensor:
        """Returns the log-probs of tanh(u), in the unit box [-1, 1], in which SAC has its target entropy."""
        distance = (stored - self.mean) * (-self.log_std).exp()
        of_gaussian = -0.5 * distance.square() - self.log_std - 0.5 * math.log(2 * math.pi)
        return (of_gaussian - log_slope(stored)).sum(-1)

    def entropy(self) -> Tensor:
        """Computes the entropy of the Gaussian plus the mean of log da/du, by quadrature."""
        places, weights = (self.mean.new_tensor(each) for each in _QUADRATURE)
        u = self.mean.unsqueeze(-1) + self.log_std.exp().unsqueeze(-1) * places
        slopes = (log_slope(u) * weights).sum(-1)
        return (0.5 + 0.5 * math.log(2 * math.pi) + self.log_std + slopes).sum(-1) + self.width


def log_slope(u: Tensor) -> Tensor:
    """Computes log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)), which stays finite for large u."""
    return 2 * (math.log(2) - u - functional.softplus(-2 * u))


def half_widths(space: ActionSpace) -> float:
    """Returns the sum of the logarithms of the half widths of a box."""
    return sum(math.log((high - low) / 2) for low, high in zip(space.low, space.high, strict=True))


def performed(stored: Tensor, space: ActionSpace) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Returns the actions as the environment gets them, float32 [states, stored]."""
    if space.kind == "discrete":
        return np.asarray((stored + space.start).numpy(), np.float32)
    low, high = np.array(space.low, np.float32), np.array(space.high, np.float32)
    squashed: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = low + (stored.tanh().numpy() + 1) / 2 * (high - low)
    return squashed.clip(low, high)


def _quadrature() -> tuple[list[float], list[float]]:
    """Returns nodes and weights with which sums are means over a standard normal distribution."""
    nodes = np.linspace(-QUADRATURE_END, QUADRATURE_END, QUADRATURE_NODES)
    weights = np.exp(-(nodes**2) / 2)
    return nodes.tolist(), (weights / weights.sum()).tolist()


_QUADRATURE = _quadrature()
