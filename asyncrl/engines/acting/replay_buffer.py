"""The replay of SAC: the newest transitions up to a bound, drawn uniformly or by priority, and saved in checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.engines.acting.transitions import TransitionRow

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
        nodes, left = np.ones(len(points), np.int64), points.copy()
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
            total, among = float(sums[-1]), young.size
            found = np.searchsorted(sums, parts * total, side="right")
            places = young[found.clip(max=among - 1)]
        else:
            total, among = self._tree.total, len(self)
            places = self._tree.find(parts * total)
        weights = (among * self._tree.get(places) / total) ** -self._correction
        return places, (weights / weights.max()).astype(np.float32)


def _plain(value: Any) -> Any:
    """Returns nested dicts with plain numbers."""
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value
