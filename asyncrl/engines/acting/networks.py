"""Small networks of any widths: the policy that acts, the values of its states, twin critics of its actions, and the
distributions that actions are drawn from."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.engines.acting.stepping.spaces import ActionSpace, Spaces

# Distributions of actions: categorical, and a Gaussian that tanh squashes into a box.
#
# Log-probs and entropies are of whole actions, in nats, [states]. A stored action is what the policy sampled: the
# index of a discrete action, or the vector before tanh, from which log-probs can be computed again without rounding
# at the borders of the box.


LEAST_LOG_STD = -20.0
MOST_LOG_STD = 2.0
"""Bounds of the logarithm of the standard deviation, as in the authors' program of SAC (arXiv 1812.05905)."""
QUADRATURE_NODES = 96
QUADRATURE_END = 5.5
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
    low = np.array(space.low, np.float32)
    high = np.array(space.high, np.float32)
    squashed: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = low + (stored.tanh().numpy() + 1) / 2 * (high - low)
    return squashed.clip(low, high)


def _quadrature() -> tuple[list[float], list[float]]:
    """Returns nodes and weights with which sums are means over a standard normal distribution."""
    nodes = np.linspace(-QUADRATURE_END, QUADRATURE_END, QUADRATURE_NODES)
    weights = np.exp(-(nodes**2) / 2)
    return nodes.tolist(), (weights / weights.sum()).tolist()


_QUADRATURE = _quadrature()

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "leaky_relu": nn.LeakyReLU,
}
LAST_GAIN = 0.01
"""Gain of the first weights of a policy's last layer: it begins near the uniform policy (arXiv 2006.05990)."""
CRITICS = 2


class Actor(nn.Module):
    """The policy: layers of `hidden` widths, and a head for the action space. Acting workers get nothing else."""

    def __init__(self, spaces: Spaces, hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        self.space = spaces.action
        outputs = self.space.size * (1 if self.space.kind == "discrete" else 2)
        self.layers = _layers(spaces.observation, hidden, outputs, activation, LAST_GAIN)
        self._width = half_widths(self.space)

    def forward(self, observations: Tensor) -> Tensor:
        return cast(Tensor, self.layers(observations))

    def distribution(self, observations: Tensor) -> ActionDistribution:
        """Returns the distribution of actions in these states [states, observation]."""
        if self.space.kind == "box":
            return self.gaussian(observations)
        return CategoricalActions(self(observations))

    def gaussian(self, observations: Tensor) -> SquashedGaussian:
        """Returns the distribution over a box."""
        mean, log_std = self(observations).chunk(2, dim=-1)
        return SquashedGaussian(mean, log_std.clamp(LEAST_LOG_STD, MOST_LOG_STD), self._width)


class StateValues(nn.Module):
    """The critic of PPO: the value of a state."""

    def __init__(self, spaces: Spaces, hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        self.layers = _layers(spaces.observation, hidden, 1, activation, 1.0)

    def forward(self, observations: Tensor) -> Tensor:
        return cast(Tensor, self.layers(observations)).squeeze(-1)


class TwinCritics(nn.Module):
    """The critics of SAC: two values of a state and a squashed action in [-1, 1], computed as one batch of products."""

    def __init__(self, spaces: Spaces, hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        sizes = [spaces.observation + spaces.action.size, *hidden, 1]
        self.weights = nn.ParameterList(
            [_uniform(CRITICS, inputs, outputs, inputs=inputs) for inputs, outputs in _pairs(sizes)]
        )
        self.biases = nn.ParameterList(
            [_uniform(CRITICS, 1, outputs, inputs=inputs) for inputs, outputs in _pairs(sizes)]
        )
        self.activation = ACTIVATIONS[activation]()

    def forward(self, observations: Tensor, actions: Tensor, trained: bool = True) -> Tensor:
        """Returns [critics, states]. trained: gradients reach the critics, and not the actions alone."""
        values = torch.cat([observations, actions], dim=-1).expand(CRITICS, -1, -1)
        layers = [*zip(self.weights, self.biases, strict=True)]
        for number, (weight, bias) in enumerate(layers, 1):
            values = torch.baddbmm(*(bias, values, weight) if trained else (bias.detach(), values, weight.detach()))
            if number < len(layers):
                values = self.activation(values)
        return values.squeeze(-1)


def _layers(inputs: int, hidden: Sequence[int], outputs: int, activation: str, last_gain: float) -> nn.Sequential:
    """Makes linear layers with orthogonal weights (arXiv 2006.05990 compares such choices)."""
    sizes = [inputs, *hidden, outputs]
    found: list[nn.Module] = []
    for number, (before, after) in enumerate(_pairs(sizes)):
        layer = nn.Linear(before, after)
        is_last = number == len(sizes) - 2
        nn.init.orthogonal_(layer.weight, last_gain if is_last else math.sqrt(2))
        nn.init.zeros_(layer.bias)
        found += [layer] if is_last else [layer, ACTIVATIONS[activation]()]
    return nn.Sequential(*found)


def _pairs(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(sizes))


def _uniform(*shape: int, inputs: int) -> nn.Parameter:
    """Makes a parameter as `nn.Linear` begins with: uniform within 1 / sqrt(inputs)."""
    bound = 1 / math.sqrt(inputs)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
