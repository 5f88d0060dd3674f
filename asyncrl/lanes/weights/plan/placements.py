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
from numpy.typing import NDArray

# Boxes in the coordinates of a tensor: one range of indices per dimension.
#
# `Box` is one box as Python integers. `Bounds` are n boxes as an array (n, k, 2) of starts and stops, k dimensions.


Box = tuple[tuple[int, int], ...]
Ints = NDArray[np.int64]
Bounds = Ints


def box_volume(box: Box) -> int:
    """Returns the number of elements; 1 for a box without dimensions."""
    return prod(stop - start for start, stop in box)


def volumes(bounds: Bounds) -> Ints:
    """Returns the number of elements of each box (n)."""
    return np.asarray(np.prod(bounds[..., 1] - bounds[..., 0], axis=-1, dtype=np.int64))


def as_bounds(boxes: Sequence[Box], dimensions: int) -> Bounds:
    return np.array(boxes, np.int64).reshape(len(boxes), dimensions, 2)


def as_box(bounds: Bounds) -> Box:
    """Returns one row (k, 2) of bounds as a box."""
    return tuple((int(start), int(stop)) for start, stop in bounds.tolist())


def intersections(first: Bounds, second: Bounds) -> tuple[Ints, Ints, Bounds]:
    """Returns (indices into first, indices into second, bounds) of all pairs that share elements, by first, then
    second."""
    starts = np.maximum(first[:, None, :, 0], second[None, :, :, 0])
    stops = np.minimum(first[:, None, :, 1], second[None, :, :, 1])
    left, right = np.nonzero((stops > starts).all(axis=-1))
    return left, right, np.stack([starts[left, right], stops[left, right]], axis=-1)


def intersection(first: Box, second: Box) -> Box | None:
    """Returns what two boxes share, None if that is nothing."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def difference(box: Box, hole: Box) -> list[Box]:
    """Returns at most 2 k disjoint boxes: the elements of `box` that are not in `hole`."""
    if (shared := intersection(box, hole)) is None:
        return [box]
    parts: list[Box] = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, shared, strict=True)):
        sides = [each for each in ((start, low), (high, stop)) if each[0] < each[1]]
        parts += [(*shared[:dim], side, *box[dim + 1 :]) for side in sides]
    return parts


def overlap(bounds: Bounds) -> bool:
    """Returns whether any two of the boxes share elements."""
    if bounds.shape[1] == 0:
        return len(bounds) > 1
    ordered = bounds[np.argsort(bounds[:, 0, 0], kind="stable")]
    reach = np.searchsorted(ordered[:, 0, 0], ordered[:, 0, 1]) - np.arange(len(ordered))
    for step in range(1, int(reach.max(initial=1))):  # Only the boxes up to `reach` begin before a box ends.
        one = ordered[:-step]
        other = ordered[step:]
        starts = np.maximum(one[..., 0], other[..., 0])
        stops = np.minimum(one[..., 1], other[..., 1])
        if (stops > starts).all(axis=-1).any():
            return True
    return False


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Returns the elements start to stop of a row-major tensor of k dimensions as at most 2 k - 1 boxes, in memory
    order."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = prod(shape[1:])
    (first, skipped), (last, rest) = divmod(start, row), divmod(stop, row)
    if first == last:
        return [((first, first + 1), *inner) for inner in flat_boxes(shape[1:], skipped, rest)]
    boxes: list[Box] = []
    if skipped:
        boxes += [((first, first + 1), *inner) for inner in flat_boxes(shape[1:], skipped, row)]
        first += 1
    if first < last:
        boxes.append(((first, last), *((0, size) for size in shape[1:])))
    return boxes + [((last, last + 1), *inner) for inner in flat_boxes(shape[1:], 0, rest)]


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
    size = prod(shape)
    by_rank = dict[int, list[Box]]()
    for ranks in replicas:
        chunk = -(-size // len(ranks))
        for index, rank in enumerate(ranks):
            by_rank[rank] = flat_boxes(shape, min(index * chunk, size), min((index + 1) * chunk, size))
    return Boxes.of(by_rank)
