"""Placements: which ranks hold which boxes of a tensor, in the coordinates of the Hugging Face checkpoint.

A `Mesh` is an array of ranks with `Shard(dim)` or `Replicate` per axis. A mesh of some of the ranks makes these the
owners: a pipeline stage, the holders of an expert. `Boxes` is the general form. Shards follow torch.chunk: ceil(n / m)
indices each, the last ones fewer or none; axes cut in their order, the outer one first, as in DTensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import numpy as np

from asyncrl.lanes.weights.plan.index_boxes import Bounds, Box, Ints, as_bounds, flat_boxes, overlap

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes of an element on the wire, by dtype."""


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Names one tensor of the checkpoint. dtype: on the wire, a key of ITEM_BYTES, else ValueError."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name} has dtype {self.dtype!r}; dtypes of a plan are {', '.join(ITEM_BYTES)}")

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Shard:
    """Cuts dimension `dim` over an axis of the mesh."""

    dim: int

    def __str__(self) -> str:
        return f"shard {self.dim}"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Gives every rank along an axis of the mesh the same."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """Lists non-empty boxes (n, k, 2) with the rank (n) that holds each."""

    bounds: Bounds
    ranks: Ints


@dataclass(frozen=True, slots=True)
class Mesh:
    """Places a tensor on an array of ranks. ranks: row-major over `shape`; cuts: one for each axis. Raises ValueError
    for sizes that do not fit, and for a rank that stands twice."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    cuts: tuple[Shard | Replicate, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != prod(self.shape) or len(self.cuts) != len(self.shape):
            raise ValueError(f"a mesh of shape {self.shape} has {len(self.ranks)} ranks and {len(self.cuts)} cuts")
        if len(set(self.ranks)) < len(self.ranks) or min(self.ranks, default=0) < 0:
            raise ValueError("each rank stands once in a mesh, and is at least 0")

    @classmethod
    def of(cls, ranks: Ints, *cuts: Shard | Replicate) -> Self:
        """Makes the mesh of an array of ranks, with one cut for each of its axes."""
        return cls(tuple(ranks.ravel().tolist()), ranks.shape, cuts)

    def held(self, shape: Sequence[int]) -> HeldBoxes:
        """Returns what each rank holds of a tensor. Raises ValueError when the tensor lacks a dimension to cut."""
        starts = [np.zeros(self.shape, np.int64) for _ in shape]
        stops = [np.full(self.shape, size, np.int64) for size in shape]
        for axis, cut in enumerate(self.cuts):
            if isinstance(cut, Replicate):
                continue
            if not 0 <= cut.dim < len(shape):
                raise ValueError(f"shard {cut.dim} needs a tensor of {cut.dim + 1} dimensions, not of {len(shape)}")
            index = np.arange(self.shape[axis]).reshape([-1 if each == axis else 1 for each in range(len(self.shape))])
            chunk = -(-(stops[cut.dim] - starts[cut.dim]) // self.shape[axis])
            start = starts[cut.dim] + index * chunk
            starts[cut.dim] = np.minimum(start, stops[cut.dim])
            stops[cut.dim] = np.minimum(start + chunk, stops[cut.dim])
        bounds = np.empty((len(self.ranks), len(shape), 2), np.int64)
        for dim, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            bounds[:, dim, 0], bounds[:, dim, 1] = start.ravel(), stop.ravel()
        filled = (bounds[..., 1] > bounds[..., 0]).all(axis=-1)
        return HeldBoxes(bounds[filled], np.array(self.ranks, np.int64)[filled])

    @property
    def disjoint(self) -> bool:
        """Tells that boxes of two ranks are equal or share nothing, whatever the tensor is."""
        return True

    def __str__(self) -> str:
        axes = ", ".join(f"{size} {cut}" for size, cut in zip(self.shape, self.cuts, strict=True))
        return f"mesh ({axes}) of ranks {' '.join(map(str, self.ranks))}"


@dataclass(frozen=True, slots=True)
class Boxes:
    """Places any boxes on any ranks: (rank, its boxes), ranks rising. Boxes of one rank must be disjoint."""

    by_rank: tuple[tuple[int, tuple[Box, ...]], ...]

    @classmethod
    def of(cls, by_rank: Mapping[int, Sequence[Box]]) -> Self:
        return cls(tuple((rank, tuple(sorted(boxes))) for rank, boxes in sorted(by_rank.items()) if boxes))

    def held(self, shape: Sequence[int]) -> HeldBoxes:
        """Returns what each rank holds of a tensor. Raises ValueError for boxes outside of it, of another number of
        dimensions, empty, or on the same rank with shared elements."""
        for rank, boxes in self.by_rank:
            for box in boxes:
                fits = len(box) == len(shape) and all(
                    0 <= start < stop <= size for (start, stop), size in zip(box, shape, strict=True)
                )
                if not fits:
                    raise ValueError(f"rank {rank} holds box {box}, which is not inside a tensor of shape {shape}")
            if len(boxes) > 1 and overlap(as_bounds(boxes, len(shape))):
                raise ValueError(f"boxes of rank {rank} share elements: {boxes}")
        flat = [(rank, box) for rank, boxes in self.by_rank for box in boxes]
        bounds = as_bounds([box for _, box in flat], len(shape))
        return HeldBoxes(bounds, np.array([rank for rank, _ in flat], np.int64))

    @property
    def disjoint(self) -> bool:
        """Tells that boxes of two ranks may share some of their elements."""
        return False

    def __str__(self) -> str:
        return "; ".join(f"rank {rank} {boxes}" for rank, boxes in self.by_rank)


Placement = Mesh | Boxes


def flat_shards(shape: Sequence[int], replicas: Sequence[Sequence[int]]) -> Boxes:
    """Places a tensor as ZeRO-3 does: cut into equal flat ranges of ceil(n / m) elements, the last ones shorter, over
    the m ranks of each replica (DeepSpeed, `partition_parameters.py`: `partition_size`)."""
    size, by_rank = prod(shape), dict[int, list[Box]]()
    for ranks in replicas:
        chunk = -(-size // len(ranks))
        for index, rank in enumerate(ranks):
            by_rank[rank] = flat_boxes(shape, min(index * chunk, size), min((index + 1) * chunk, size))
    return Boxes.of(by_rank)
