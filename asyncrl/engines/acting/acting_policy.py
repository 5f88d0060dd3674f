"""The policy of an acting worker: samples actions for the states of environments, with the newest published weights."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.acting.networks import Actor, half_widths, performed
from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.lanes.weights.slot_memory import WeightsSpec, spec_of

Floats = NDArray[np.float32]
NO_WEIGHTS = -1
"""Version before the first weights."""


class ActingPolicy:
    """version: of its weights. Below `random_until` SAC acts at random, uniformly over its box. Not thread-safe."""

    def __init__(self, config: Config, spaces: Spaces, seed: int, version: int = NO_WEIGHTS) -> None:
        settings = config.acting
        self.version = version
        self.spaces = spaces
        self.actor = Actor(spaces, settings.hidden_size, settings.activation).requires_grad_(False)
        self._random = torch.Generator().manual_seed(seed)
        step = config.task.prompts_per_step * settings.environments * settings.transitions
        self.random_until = -(-settings.warm_up // step) if settings.algorithm == "sac" else 0

    @property
    def spec(self) -> WeightsSpec:
        return spec_of(self.actor, "float32")

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copies published weights."""
        for name, parameter in self.actor.named_parameters():
            parameter.copy_(tensors[name])
        self.version = version

    @torch.no_grad()
    def act(self, states: Floats, *, greedy: bool = False) -> tuple[Floats, Floats, Floats]:
        """Returns for each state the stored action, its log-prob, and the action as the environment gets it. greedy:
        the likeliest action, or the mean of a Gaussian."""
        if self.random_until and self.version < self.random_until and not greedy:
            return self._at_random(len(states))
        distribution = self.actor.distribution(torch.from_numpy(np.ascontiguousarray(states)))
        stored = distribution.mode() if greedy else distribution.sample(self._random)
        logprobs = distribution.logprobs(stored)
        return stored.numpy(), logprobs.numpy(), performed(stored, self.spaces.action)

    def _at_random(self, count: int) -> tuple[Floats, Floats, Floats]:
        """Draws uniformly from the box; the stored action is what tanh makes of it."""
        space = self.spaces.action
        unit = torch.rand(count, space.size, generator=self._random) * 2 - 1
        stored = unit.clamp(-1 + 1e-6, 1 - 1e-6).atanh()
        density = -half_widths(space) - space.size * float(np.log(2))
        return stored.numpy(), np.full(count, density, np.float32), performed(stored, space)
