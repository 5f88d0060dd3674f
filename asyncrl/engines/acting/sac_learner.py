"""SAC (arXiv 1812.05905): twin critics, a learned temperature, target networks, and a replay of old transitions."""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.config.schema import Config
from asyncrl.engines.acting.learner import Learner
from asyncrl.engines.acting.networks import TwinCritics
from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.engines.acting.transitions import TransitionRow
from asyncrl.objectives.losses import actor_loss, critics_loss, move_towards, soft_targets, temperature_loss

# The replay of SAC: the newest transitions up to a bound, drawn uniformly or by priority, and saved in checkpoints.


Ints = NDArray[np.int64]
LEAST_PRIORITY = 1e-6
"""Added to an error: a transition without one is drawn again some day (arXiv 1511.05952, section 3.3)."""


@dataclass(frozen=True, slots=True)
class DrawnTransitions:
    """Transitions that were drawn. All are float32 [transitions] or [transitions, numbers]. places: in the buffer.
    versions: of the weights that acted. weights: that correct for the priorities, 1 at most."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor
    terminated: Tensor
    weights: Tensor
    versions: Ints
    places: Ints


class SumTree:
    """Sums of priorities: changes and draws in proportion take a time that is logarithmic in their number."""

    def __init__(self, size: int) -> None:
        self._leaves = 1 << max(1, size - 1).bit_length()
        self._sums = np.zeros(2 * self._leaves)

    @property
    def total(self) -> float:
        return float(self._sums[1])

    def set(self, places: Ints, priorities: NDArray[np.float64]) -> None:
        nodes = places + self._leaves
        self._sums[nodes] = priorities
        while nodes[0] > 1:
            nodes = np.unique(nodes // 2)
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def get(self, places: Ints) -> NDArray[np.float64]:
        return self._sums[places + self._leaves]

    def find(self, points: NDArray[np.float64]) -> Ints:
        """Returns the places at which the running sum of priorities passes these points, each below the total."""
        nodes = np.ones(len(points), np.int64)
        left = points.copy()
        for _ in range(self._leaves.bit_length() - 1):
            nodes *= 2
            below = self._sums[nodes]
            goes_right = (left >= below) & (self._sums[nodes + 1] > 0)
            left -= np.where(goes_right, below, 0.0)
            nodes += goes_right
        return nodes - self._leaves


class ReplayBuffer:
    """A ring of `size` transitions. kind: "uniform", or "prioritised" by the error of the critics to the power
    `exponent` (arXiv 1511.05952), whose draws are corrected to the power `correction`.

    added: transitions that were ever added. The journal has the samples that they came from, in the order of steps.
    """

    def __init__(
        self,
        size: int,
        spaces: Spaces,
        seed: int,
        kind: Literal["uniform", "prioritised"] = "uniform",
        exponent: float = 0.6,
        correction: float = 0.4,
    ) -> None:
        self.added = 0
        self._size = size
        self._numbers = {
            "observations": np.zeros((size, spaces.observation), np.float32),
            "actions": np.zeros((size, spaces.action.stored), np.float32),
            "rewards": np.zeros(size, np.float32),
            "next_observations": np.zeros((size, spaces.observation), np.float32),
            "terminated": np.zeros(size, np.float32),
        }
        self._versions = np.zeros(size, np.int64)
        self._random = np.random.default_rng(seed)
        self._exponent = exponent
        self._correction = correction
        self._tree = SumTree(size) if kind == "prioritised" else None
        self._largest = 1.0

    def __len__(self) -> int:
        return min(self.added, self._size)

    def add(self, row: TransitionRow) -> None:
        """Adds the live transitions of a row in place of the oldest ones."""
        live = np.flatnonzero(row.live)
        chosen = live[-self._size :]
        places = (self.added + np.arange(len(live) - len(chosen), len(live))) % self._size
        for name, values in self._numbers.items():
            values[places] = getattr(row, name)[chosen]
        self._versions[places] = row.versions[chosen]
        if self._tree is not None and len(places):
            self._tree.set(places, np.full(len(places), self._largest))
        self.added += len(live)

    def draw(self, count: int, oldest: int = 0) -> DrawnTransitions:
        """Draws with replacement, none that acted before version `oldest` while there are others: as from a buffer that
        never held those. There has to be one transition at least."""
        places, weights = self._places(count, oldest)
        tensors = {name: torch.from_numpy(values[places]) for name, values in self._numbers.items()}
        return DrawnTransitions(
            **tensors, weights=torch.from_numpy(weights), versions=self._versions[places], places=places
        )

    def update(self, drawn: DrawnTransitions, errors: NDArray[np.float64]) -> None:
        """Takes the absolute errors of drawn transitions as their new priorities, in a prioritised buffer."""
        assert self._tree is not None, "a uniform replay has no priorities"
        priorities = (np.abs(errors) + LEAST_PRIORITY) ** self._exponent
        self._largest = max(self._largest, float(priorities.max()))
        self._tree.set(drawn.places, priorities)

    def state(self) -> dict[str, Any]:
        """Returns everything as tensors and plain values, for a checkpoint."""
        kept = len(self)
        arrays = {name: torch.from_numpy(values[:kept].copy()) for name, values in self._numbers.items()}
        priorities = None if self._tree is None else torch.from_numpy(self._tree.get(np.arange(kept)))
        numbers = {"added": self.added, "largest": self._largest, "random": _plain(self._random.bit_generator.state)}
        return {
            **numbers,
            "arrays": arrays,
            "versions": torch.from_numpy(self._versions[:kept].copy()),
            "priorities": priorities,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` returned, of a buffer of the same size."""
        kept = len(state["versions"])
        for name, values in self._numbers.items():
            values[:kept] = state["arrays"][name].numpy()
        self._versions[:kept] = state["versions"].numpy()
        self.added = state["added"]
        self._largest = state["largest"]
        self._random.bit_generator.state = state["random"]
        if self._tree is not None and kept:
            given = state["priorities"]
            self._tree.set(np.arange(kept), np.full(kept, self._largest) if given is None else given.numpy())

    def _places(self, count: int, oldest: int) -> tuple[Ints, NDArray[np.float32]]:
        young = np.flatnonzero(self._versions[: len(self)] >= oldest)
        are_some = 0 < young.size < len(self)
        if self._tree is None:
            drawn = self._random.integers(young.size if are_some else len(self), size=count)
            return young[drawn] if are_some else drawn, np.ones(count, np.float32)
        parts = (np.arange(count) + self._random.random(count)) / count  # One draw from each of `count` equal parts.
        if are_some:
            sums = self._tree.get(young).cumsum()
            total = float(sums[-1])
            among = young.size
            found = np.searchsorted(sums, parts * total, side="right")
            places = young[found.clip(max=among - 1)]
        else:
            total = self._tree.total
            among = len(self)
            places = self._tree.find(parts * total)
        weights = (among * self._tree.get(places) / total) ** -self._correction
        return places, (weights / weights.max()).astype(np.float32)


def _plain(value: Any) -> Any:
    """Returns nested dicts with plain numbers."""
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


class Temperature(nn.Module):
    """The logarithm of the temperature, which begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))


class SacLearner(Learner):
    """Adds the live transitions of a step to the replay, then takes updates in proportion to their number."""

    def __init__(self, config: Config, spaces: Spaces) -> None:
        super().__init__(config, spaces)
        settings = self.settings
        self.critics = TwinCritics(spaces, settings.hidden_size, settings.activation)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.temperature = Temperature()
        self.replay = ReplayBuffer(settings.replay_size, spaces, config.seed, settings.replay)
        step = config.task.prompts_per_step * settings.environments * settings.transitions
        updates = round(step * settings.updates_per_transition)
        self.optimizer = self.optimizer_of([self.actor, self.critics, self.temperature], updates)
        self._target_entropy = -float(spaces.action.size)
        """Minus the number of dimensions, in the box [-1, 1] of squashed actions (arXiv 1812.05905, appendix D)."""

        self._target_weights: list[Tensor] = [*self.targets.parameters()]
        self._critic_weights: list[Tensor] = [*self.critics.parameters()]
        self._owed = 0.0
        self._sums: dict[str, list[Tensor | float]] = defaultdict(list)

    @property
    def modules(self) -> dict[str, nn.Module]:
        own = {"actor": self.actor, "critics": self.critics}
        return {**own, "targets": self.targets, "temperature": self.temperature}

    def learn(self, rows: Sequence[TransitionRow], version: int) -> Iterator[bool]:
        self._sums.clear()
        for row in rows:
            self.replay.add(row)
            row.trained = int(row.live.sum())
        if self.replay.added < self.settings.warm_up:
            return
        self._owed += self.settings.updates_per_transition * sum(row.trained for row in rows)
        while self._owed >= 1:
            self._owed -= 1
            self._update(self.replay.draw(self.settings.minibatch, self._oldest(version)), version)
            yield True

    def metrics(self) -> dict[str, float]:
        found = {name: fmean(map(float, values)) for name, values in self._sums.items()}
        return {
            **found,
            "replay/transitions": float(len(self.replay)),
            "sac/temperature": float(self.temperature.log.detach().exp()),
        }

    def state(self) -> dict[str, Any]:
        return {"replay": self.replay.state(), "owed": self._owed}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.replay.restore(state["replay"])
        self._owed = state["owed"]

    def _oldest(self, version: int) -> int:
        return version - self.settings.replay_max_age if self.settings.replay_max_age else 0

    def _update(self, drawn: DrawnTransitions, version: int) -> None:
        """Takes one step down the sum of three losses, each with gradients for a network of its own."""
        temperature = self.temperature.log.exp().detach()
        distribution = self.actor.gaussian(drawn.observations)
        acted = distribution.with_gradient()
        logprobs = distribution.unit_logprobs(acted)
        values = self.critics(drawn.observations, drawn.actions.tanh())
        targets = self._targets(drawn, temperature)
        of_critics = critics_loss(values, targets, drawn.weights)
        judged = self.critics(drawn.observations, acted.tanh(), trained=False).amin(dim=0)
        of_actor = actor_loss(logprobs, judged, temperature)
        of_temperature = temperature_loss(self.temperature.log, logprobs, self._target_entropy)
        if not self.take(of_critics + of_actor + of_temperature):
            return
        move_towards(self._target_weights, self._critic_weights, self.settings.tau)
        if self.settings.replay == "prioritised":
            self.replay.update(drawn, (values - targets).detach().abs().mean(dim=0).double().numpy())
        ages = float(version - drawn.versions.mean())
        measured = {"critic/loss": of_critics, "loss/policy": of_actor, "policy/entropy": -logprobs.mean()}
        for name, value in {**measured, "critic/value_mean": values.mean(), "replay/age_mean": ages}.items():
            self._sums[name].append(value.detach() if isinstance(value, Tensor) else value)

    @torch.no_grad()
    def _targets(self, drawn: DrawnTransitions, temperature: Tensor) -> Tensor:
        following = self.actor.gaussian(drawn.next_observations)
        then = following.sample()
        values = self.targets(drawn.next_observations, then.tanh()).amin(dim=0)
        logprobs = following.unit_logprobs(then)
        return soft_targets(drawn.rewards, drawn.terminated, values, logprobs, temperature, self.settings.gamma)
