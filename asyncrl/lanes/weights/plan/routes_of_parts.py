"""Patterns: which parts of a tensor go where. All tensors with the same shape, dtype and placements share one.

cell       elements that the same source ranks hold (the holders); cells are disjoint
need       a box that some destination ranks need (the receivers)
part       what a cell and a need share; it is moved as one
audience   receivers of a part that do not hold it; those that do copy it within their own memory
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from asyncrl.errors import WeightsError
from asyncrl.lanes.weights.plan.index_boxes import (
    Bounds,
    Box,
    Ints,
    as_bounds,
    as_box,
    difference,
    intersection,
    intersections,
    overlap,
    volumes,
)
from asyncrl.lanes.weights.plan.placements import HeldBoxes, Placement

NOBODY = -1
"""Fills rows of ranks that are shorter than others."""


@dataclass(frozen=True, eq=False, slots=True)
class SharedBoxes:
    """Lists boxes (n, k, 2), each with the ranks (n, m) that have it, rising, filled with NOBODY."""

    bounds: Bounds
    ranks: Ints


@dataclass(frozen=True, eq=False)
class Pattern:
    """Holds S cells, P parts in the order of their cells, and A audiences.

    holders: (S, H) ranks. parts: (P, k, 2). cell, volume, audience: of each part (P), volumes in elements. audiences:
    (A, M) ranks. sizes: ranks of each audience (A). local_part, local_rank: copies within a rank's own memory.
    """

    item_bytes: int
    holders: Ints
    parts: Bounds
    cell: Ints
    volume: Ints
    audience: Ints
    audiences: Ints
    sizes: Ints
    local_part: Ints
    local_rank: Ints
    local_volume: Ints

    @cached_property
    def audience_bytes(self) -> Ints:
        """Returns the bytes that each rank of an audience receives (A)."""
        elements = np.bincount(self.audience, self.volume, len(self.audiences)).astype(np.int64)
        return elements * self.item_bytes

    @property
    def largest_rank(self) -> int:
        return int(max(each.max(initial=NOBODY) for each in (self.holders, self.audiences, self.local_rank)))

    @property
    def single_holders(self) -> bool:
        """Tells whether every cell has one holder."""
        return len(self.holders[0]) == 1 if len(self.holders) else True

    def without_choice(self, copies: int) -> bool:
        """Returns whether only one plan sends at most `copies` of each part from the holders: no relays, one holder."""
        return self.single_holders and int(self.sizes.max(initial=0)) <= copies

    @property
    def unique_bytes(self) -> int:
        """Returns the bytes that leave the holders if each part leaves them once."""
        return int(self.volume.sum()) * self.item_bytes

    def received(self, ranks: int) -> Ints:
        """Returns the bytes that each of ranks 0 to `ranks` - 1 receives."""
        there = self.audiences != NOBODY
        arriving = np.broadcast_to(self.audience_bytes[:, None], there.shape)[there]
        return np.bincount(self.audiences[there], arriving, ranks).astype(np.int64)

    def copied(self, ranks: int) -> Ints:
        """Returns the bytes that each of ranks 0 to `ranks` - 1 copies within its own memory."""
        return np.bincount(self.local_rank, self.local_volume * self.item_bytes, ranks).astype(np.int64)


def make_pattern(shape: Sequence[int], item_bytes: int, source: Placement, destination: Placement) -> Pattern:
    """Returns the pattern of tensors of this shape. Raises WeightsError when ranks need elements that no source rank
    holds, ValueError when a placement does not fit the shape."""
    cells, needs = _cells(source, shape), _shared(destination.held(shape))
    cell, need, bounds = intersections(cells.bounds, needs.bounds)
    volume = volumes(bounds)
    covered = np.bincount(need, volume, len(needs.bounds)).astype(np.int64)
    for missing in np.flatnonzero(covered != volumes(needs.bounds)):
        receivers = [rank for rank in needs.ranks[missing].tolist() if rank != NOBODY]
        raise WeightsError(
            f"ranks {receivers} need the box {as_box(needs.bounds[missing])}; source ranks hold only "
            f"{int(covered[missing])} of its elements"
        )
    return _with_audiences(item_bytes, cells, needs, cell, need, bounds)


def _with_audiences(
    item_bytes: int, cells: SharedBoxes, needs: SharedBoxes, cell: Ints, need: Ints, bounds: Bounds
) -> Pattern:
    receivers = needs.ranks[need]
    local = _held_already(cells, cell, receivers)
    volume = volumes(bounds)
    local_part, column = np.nonzero(local)
    if len(local_part):
        remote = (receivers != NOBODY) & ~local
        first = np.argsort(~remote, axis=1, kind="stable")
        audiences = np.take_along_axis(np.where(remote, receivers, NOBODY), first, axis=1)
        audience = np.arange(len(bounds))
    else:
        audiences, audience = needs.ranks, need
    return Pattern(
        item_bytes=item_bytes,
        holders=cells.ranks,
        parts=bounds,
        cell=cell,
        volume=np.where((audiences[audience] != NOBODY).any(axis=1), volume, 0),
        audience=audience,
        audiences=audiences,
        sizes=(audiences != NOBODY).sum(axis=1),
        local_part=local_part,
        local_rank=receivers[local_part, column],
        local_volume=volume[local_part],
    )


def _held_already(cells: SharedBoxes, cell: Ints, receivers: Ints) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Returns (P, M): whether the receiver of a part is a holder of its cell."""
    ranks = int(max(cells.ranks.max(initial=0), receivers.max(initial=0))) + 1
    holds = np.zeros((len(cells.bounds), ranks + 1), bool)  # The last column stands for NOBODY.
    holds[np.arange(len(cells.bounds))[:, None], cells.ranks] = True
    holds[:, NOBODY] = False
    return np.asarray(holds[cell[:, None], receivers])


def _shared(held: HeldBoxes) -> SharedBoxes:
    """Groups equal boxes."""
    count, dimensions = held.bounds.shape[:2]
    if count == 0 or dimensions == 0:
        unique, group = held.bounds[: min(count, 1)], np.zeros(count, np.int64)
    else:
        flat, group = np.unique(held.bounds.reshape(count, -1), axis=0, return_inverse=True)
        unique, group = flat.reshape(-1, dimensions, 2), group.ravel()
    order = np.lexsort((held.ranks, group))
    sizes = np.bincount(group, minlength=len(unique))
    ranks = np.full((len(unique), sizes.max(initial=1)), NOBODY, np.int64)
    column = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ranks[group[order], column] = held.ranks[order]
    return SharedBoxes(unique, ranks)


def _cells(source: Placement, shape: Sequence[int]) -> SharedBoxes:
    """Returns disjoint boxes with all of their holders."""
    shared = _shared(source.held(shape))
    if source.disjoint or not overlap(shared.bounds):
        return shared
    cells: list[tuple[Box, frozenset[int]]] = []
    for bounds, ranks in zip(shared.bounds, shared.ranks.tolist(), strict=True):
        cells = _overlaid(cells, as_box(bounds), frozenset(ranks) - {NOBODY})
    flat = [(box, rank) for box, ranks in cells for rank in sorted(ranks)]
    bounds = as_bounds([box for box, _ in flat], len(shape))
    return _shared(HeldBoxes(bounds, np.array([rank for _, rank in flat], np.int64)))


def _overlaid(
    cells: list[tuple[Box, frozenset[int]]], box: Box, ranks: frozenset[int]
) -> list[tuple[Box, frozenset[int]]]:
    """Returns disjoint cells that cover also `box`: a cell that it shares a part with is split."""
    rest, found = [box], list[tuple[Box, frozenset[int]]]()
    for cell, holders in cells:
        if (shared := intersection(cell, box)) is None:
            found.append((cell, holders))
            continue
        found.append((shared, holders | ranks))
        found += [(each, holders) for each in difference(cell, shared)]
        rest = [each for part in rest for each in difference(part, shared)]
    return found + [(each, ranks) for each in rest]
