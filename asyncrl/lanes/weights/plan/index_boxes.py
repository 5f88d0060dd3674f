"""Boxes in the coordinates of a tensor: one range of indices per dimension.

`Box` is one box as Python integers. `Bounds` are n boxes as an array (n, k, 2) of starts and stops, k dimensions.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

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
        one, other = ordered[:-step], ordered[step:]
        starts, stops = np.maximum(one[..., 0], other[..., 0]), np.minimum(one[..., 1], other[..., 1])
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
