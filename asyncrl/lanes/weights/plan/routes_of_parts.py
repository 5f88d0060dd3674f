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
from asyncrl.lanes.weights.plan.placements import (
    Bounds,
    Box,
    HeldBoxes,
    Ints,
    Placement,
    as_bounds,
    as_box,
    difference,
    intersection,
    intersections,
    overlap,
    volumes,
)

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
    cells = _cells(source, shape)
    needs = _shared(destination.held(shape))
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
        audiences = needs.ranks
        audience = need
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
        unique = held.bounds[: min(count, 1)]
        group = np.zeros(count, np.int64)
    else:
        flat, group = np.unique(held.bounds.reshape(count, -1), axis=0, return_inverse=True)
        unique = flat.reshape(-1, dimensions, 2)
        group = group.ravel()
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
    rest = [box]
    found = list[tuple[Box, frozenset[int]]]()
    for cell, holders in cells:
        if (shared := intersection(cell, box)) is None:
            found.append((cell, holders))
            continue
        found.append((shared, holders | ranks))
        found += [(each, holders) for each in difference(cell, shared)]
        rest = [each for part in rest for each in difference(part, shared)]
    return found + [(each, ranks) for each in rest]


# Balance: which holder sends which part, and which receivers pass it on, so that no rank sends much more than others.
#
# What leaves a cell is a line: its parts in order, each as often as copies of it leave the holders. A line is cut
# into consecutive shares, one for each chosen holder. The least loaded holders are chosen and filled to one level, as
# water does; a line shorter than a grain has one sender. Tensors with the fewest holders and the most bytes come
# first, since they leave the least choice.
#
# Receivers beyond the copies get a part from other receivers, along trees:
#
#     positions of an audience with 2 copies:   0 1      the two heads receive from holders
#                                              /| |\
#                                             2 3 4 5    position i receives from position (i - 2) // 2
#
# Receivers that passed on the fewest bytes so far stand first in the order, so that relaying is balanced too.


CHILDREN = 2
"""Receivers that one receiver passes a part on to."""

FULL = 1 << 50
"""Load that stands for no holder: more bytes than any rank sends; 1,024 times as many still fit 64 bits."""


@dataclass(frozen=True, eq=False, slots=True)
class Line:
    """Measures in elements what leaves the holders of a pattern. start: of each part, and the end (P + 1). cell_start:
    of each cell, and the end (S + 1). row: elements that one sender sends whole (P)."""

    start: Ints
    cell_start: Ints
    row: Ints

    def aligned(self, places: Ints, volume: Ints) -> Ints:
        """Moves places on the line back to the next start of a row."""
        if not len(volume):
            return places
        part = np.clip(np.searchsorted(self.start, places, side="right") - 1, 0, len(volume) - 1)
        past = (places - self.start[part]) % np.maximum(volume[part], 1)
        return np.asarray(places - past % self.row[part])


def make_line(pattern: Pattern, copies: int) -> Line:
    """Lays the parts of all cells on one line, at most `copies` times each."""
    each = np.minimum(pattern.sizes[pattern.audience], copies)
    start = np.concatenate([[0], np.cumsum(pattern.volume * each)])
    cell_start = start[np.searchsorted(pattern.cell, np.arange(len(pattern.holders) + 1))]
    return Line(start, cell_start, row_volumes(pattern))


def row_volumes(pattern: Pattern) -> Ints:
    """Returns the elements of one index of the first dimension of each part (P) that has several indices."""
    extents = pattern.parts[..., 1] - pattern.parts[..., 0]
    if not extents.shape[1]:
        return np.ones(len(extents), np.int64)
    split = np.argmax(extents > 1, axis=1)
    return np.asarray(np.prod(extents, axis=1) // np.take_along_axis(extents, split[:, None], axis=1)[:, 0])


@dataclass(frozen=True, eq=False, slots=True)
class Route:
    """Says who sends a tensor. senders: (S, n) ranks. cuts: (S, n + 1), where their shares of each cell's line begin
    and end. order: (A, M) ranks of each audience by position."""

    senders: Ints
    cuts: Ints
    order: Ints


class Loads:
    """Counts the bytes that each rank sends as a holder and passes on as a receiver, and chooses who sends next.

    copies: that leave the holders of a part at most. grain: bytes below which a line is not cut.
    """

    def __init__(self, ranks: int, copies: int, grain: int) -> None:
        self.sent = np.zeros(ranks + 1, np.int64)
        self.sent[NOBODY] = FULL
        self.relayed = np.zeros(ranks + 1, np.int64)
        self._copies = copies
        self._grain = grain

    def route(self, pattern: Pattern, line: Line, tensors: int) -> Route:
        """Chooses the senders and relays of a number of tensors alike, and counts their bytes."""
        senders, cuts = self._senders(pattern, line, tensors)
        np.add.at(self.sent, senders, np.diff(cuts, axis=1) * (pattern.item_bytes * tensors))
        self.sent[NOBODY] = FULL
        return Route(senders, cuts, self._order(pattern, tensors))

    def _senders(self, pattern: Pattern, line: Line, tensors: int) -> tuple[Ints, Ints]:
        if pattern.single_holders:
            return pattern.holders, np.stack([line.cell_start[:-1], line.cell_start[1:]], axis=1)
        loads = self.sent[pattern.holders]
        by_load = np.argsort(loads, axis=1, kind="stable")
        item_bytes = pattern.item_bytes * tensors
        length = np.diff(line.cell_start) * item_bytes
        shares = _filled(np.take_along_axis(loads, by_load, axis=1), length, self._grain)
        width = max(1, int((shares > 0).sum(axis=1).max(initial=0)))
        inner = line.cell_start[:-1, None] + np.cumsum(shares[:, : width - 1], axis=1) // item_bytes
        cuts = np.empty((len(length), width + 1), np.int64)
        cuts[:, 0], cuts[:, -1] = line.cell_start[:-1], line.cell_start[1:]
        cuts[:, 1:-1] = np.minimum(line.aligned(inner, pattern.volume), cuts[:, -1:])
        return np.take_along_axis(pattern.holders, by_load, axis=1)[:, :width], cuts

    def _order(self, pattern: Pattern, tensors: int) -> Ints:
        if pattern.sizes.max(initial=0) <= self._copies:
            return pattern.audiences
        loads = np.where(pattern.audiences == NOBODY, FULL, self.relayed[pattern.audiences])
        order = np.take_along_axis(pattern.audiences, np.argsort(loads, axis=1, kind="stable"), axis=1)
        passed_on = children(np.arange(order.shape[1]), pattern.sizes[:, None], self._copies)
        np.add.at(self.relayed, order, passed_on * (pattern.audience_bytes * tensors)[:, None])
        self.relayed[NOBODY] = 0
        return order


def _filled(loads: Ints, length: Ints, grain: int) -> Ints:
    """Returns the bytes (S, H) that each holder takes of its cell's `length`. loads: (S, H), rising."""
    count = np.arange(1, loads.shape[1] + 1)
    below = np.cumsum(loads, axis=1)
    allowed = count <= np.clip(-(-length // grain), 1, None)[:, None]
    taking = allowed & (loads < FULL) & (count * loads - below < length[:, None])
    takers = np.maximum(taking.sum(axis=1), 1)[:, None]
    level = (length[:, None] + np.take_along_axis(below, takers - 1, axis=1)) // takers
    shares = np.where(count <= takers, np.maximum(level - loads, 0), 0)
    short = length - shares.sum(axis=1)  # Fewer bytes than there are takers, lost in the division.
    shares[:, 0] += np.where(length > 0, short, 0)
    return np.asarray(shares)


def children(position: Ints, size: Ints, copies: int) -> Ints:
    """Returns how many receivers each position of an audience of `size` receivers passes a part on to."""
    return np.where(position < size, np.clip(size - copies - CHILDREN * position, 0, CHILDREN), 0)


def parent(position: int, copies: int) -> int | None:
    """Returns the position that passes a part on to `position`, None if a holder sends it."""
    return None if position < copies else (position - copies) // CHILDREN


def depth(position: int, copies: int) -> int:
    """Returns how often a part was passed on before it reaches a position: 0 for what holders send."""
    above = parent(position, copies)
    return 0 if above is None else 1 + depth(above, copies)
