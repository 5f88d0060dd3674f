"""The base of PPO and SAC on transitions: an actor to publish, an optimizer, and updates one at a time."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from asyncrl.config.schema import Config
from asyncrl.engines.acting.networks import Actor
from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.engines.acting.transitions import TransitionRow
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.optimizer import Optimizer

ALONE = RankMesh()
"""The ranks of a trainer with one process."""


class Learner(ABC):
    """Learns from the trajectories of a step. optimizer: of all networks that are trained. norms: gradient norms of the
    updates that this step took. refused: those that were not finite and changed no weight."""

    actor: Actor
    optimizer: Optimizer

    def __init__(self, config: Config, spaces: Spaces) -> None:
        self.config = config
        self.settings = config.acting
        self.spaces = spaces
        self.norms: list[float] = []
        self.refused = 0
        torch.manual_seed(config.seed)
        self.actor = Actor(spaces, self.settings.hidden_size, self.settings.activation)

    @abstractmethod
    def learn(self, rows: Sequence[TransitionRow], version: int) -> Iterator[bool]:
        """Takes all updates of a step, whose rows have a live transition; yields True after each."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Returns the measurements of the step."""

    @property
    @abstractmethod
    def modules(self) -> dict[str, nn.Module]:
        """Returns all networks by name, for checkpoints."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns what the learner knows besides its networks and optimizers."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` returned."""

    def optimizer_of(self, trained: Sequence[nn.Module], updates: int) -> Optimizer:
        """Makes an optimizer that takes about so many updates in each step of the run."""
        settings = self.config.training.model_copy(update={"updates": max(1, updates)})
        return Optimizer(nn.ModuleList(trained), settings, self.config.steps)

    def take(self, loss: torch.Tensor) -> bool:
        """Takes a step down the gradient of a loss, and notes its norm; changes nothing, and returns False, when either
        is not finite."""
        torch.autograd.backward(loss)
        norm = self.optimizer.step(ALONE, finite=bool(torch.isfinite(loss)))
        if norm is None:
            self.refused += 1
            return False
        self.norms.append(norm)
        return True
