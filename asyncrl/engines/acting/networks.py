"""Small networks of any widths: the policy that acts, the values of its states, and twin critics of its actions."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from asyncrl.engines.acting.action_distributions import (
    LEAST_LOG_STD,
    MOST_LOG_STD,
    ActionDistribution,
    CategoricalActions,
    SquashedGaussian,
    half_widths,
)
from asyncrl.engines.acting.stepping.spaces import Spaces

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
        layer, is_last = nn.Linear(before, after), number == len(sizes) - 2
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
