"""The schedule of one rank, made from the plan alone: what it copies, sends and receives, in which order.

A slot is (stage, phase). The stage is the wave of a part plus how often it was passed on before, so that a receiver has
a part one stage before it passes it on, while the next wave follows. The phase is (receiver - sender) mod ranks: within
a slot no rank has two senders or two receivers. Ranks that go through their slots in order cannot wait in a circle.
What a rank sends to another in one slot is cut into buckets, which hold parts in the order of layers.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncrl.lanes.weights.plan.placements import Box, as_box, box_volume
from asyncrl.lanes.weights.plan.routes_of_parts import CHILDREN, depth, parent
from asyncrl.lanes.weights.plan.weight_plan import PlannedTensor, WeightPlan


class Part(NamedTuple):
    """Names a box of a tensor. relayed: the sender reads it where it received it, not where it holds it as a source."""

    tensor: str
    box: Box
    relayed: bool


class Bucket(NamedTuple):
    """Holds the parts of one message with its bytes. peer: the receiver of what is sent, else the sender."""

    stage: int
    phase: int
    peer: int
    parts: tuple[Part, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """Holds the copies within a rank's own memory, and its buckets by stage and phase."""

    copies: tuple[Part, ...]
    sends: tuple[Bucket, ...]
    receives: tuple[Bucket, ...]


class _Move(NamedTuple):
    """Describes one box that a rank sends or receives, of every tensor on a route."""

    sends: bool
    peer: int
    depth: int
    box: Box
    relayed: bool


_Slots = dict[tuple[int, int, int], list[tuple[Part, int, int]]]
"""Parts with their elements and the bytes of one, by stage, phase and peer."""


def schedule_of(plan: WeightPlan, rank: int) -> RankSchedule:
    """Returns what one rank does in the plan; a rank that is not in it does nothing."""
    moves: dict[int, list[tuple[_Move, int, int]]] = {}
    slots: dict[bool, _Slots] = {True: defaultdict(list), False: defaultdict(list)}
    copies: list[Part] = []
    for each in plan.tensors:
        name = each.tensor.name
        item_bytes = each.tensor.item_bytes
        if id(each.route) not in moves:
            found = sorted([*_from_holders(each, rank), *_of_receiver(each, rank, plan.copies)])
            moves[id(each.route)] = [(move, _phase(move, rank, plan.ranks), box_volume(move.box)) for move in found]
        for move, phase, volume in moves[id(each.route)]:
            part = Part(name, move.box, move.relayed)
            slots[move.sends][each.wave + move.depth, phase, move.peer].append((part, volume, item_bytes))
        for index in each.pattern.local_part[each.pattern.local_rank == rank]:
            copies.append(Part(name, as_box(each.pattern.parts[index]), False))
    return RankSchedule(
        tuple(copies), tuple(_buckets(slots[True], plan.bucket_bytes)), tuple(_buckets(slots[False], plan.bucket_bytes))
    )


def _phase(move: _Move, rank: int, ranks: int) -> int:
    return ((move.peer - rank) if move.sends else (rank - move.peer)) % ranks


# ---- moves of a rank ----------------------------------------------------------------------------------------


def _from_holders(each: PlannedTensor, rank: int) -> Iterator[_Move]:
    """Yields what the rank sends as a holder: its shares of the lines of its cells."""
    pattern = each.pattern
    line = each.line
    route = each.route
    for cell, share in zip(*np.nonzero(route.senders == rank), strict=True):
        place = int(route.cuts[cell, share])
        end = int(route.cuts[cell, share + 1])
        while place < end:
            part = int(np.searchsorted(line.start, place, side="right")) - 1
            volume = int(pattern.volume[part])
            copy, past = divmod(place - int(line.start[part]), volume)
            stop = min(end, place - past + volume)
            receiver = int(route.order[pattern.audience[part], copy])
            yield _Move(True, receiver, 0, _rows(each, part, past, past + stop - place), False)
            place = stop


def _of_receiver(each: PlannedTensor, rank: int, copies: int) -> Iterator[_Move]:
    """Yields what the rank receives, and what it passes on."""
    pattern = each.pattern
    order = each.route.order
    for audience, position in zip(*np.nonzero(order == rank), strict=True):
        above = parent(int(position), copies)
        size = int(pattern.sizes[audience])
        below = [copies + CHILDREN * int(position) + child for child in range(CHILDREN)]
        for part in np.flatnonzero((pattern.audience == audience) & (pattern.volume > 0)):
            whole = as_box(pattern.parts[part])
            if above is None:
                yield from _from_senders(each, int(part), int(position))
            else:
                yield _Move(False, int(order[audience, above]), depth(int(position), copies), whole, True)
            for child in below:
                if child < size:
                    yield _Move(True, int(order[audience, child]), depth(child, copies), whole, True)


def _from_senders(each: PlannedTensor, part: int, copy: int) -> Iterator[_Move]:
    """Yields the boxes of one copy of a part, one of each holder that has a share of it."""
    volume = int(each.pattern.volume[part])
    route = each.route
    cell = int(each.pattern.cell[part])
    start = int(each.line.start[part]) + copy * volume
    cuts = route.cuts[cell]
    for share in range(max(0, int(np.searchsorted(cuts, start, side="right")) - 1), len(cuts) - 1):
        low = max(start, int(cuts[share]))
        high = min(start + volume, int(cuts[share + 1]))
        if low >= start + volume:
            break
        if low < high:
            yield _Move(False, int(route.senders[cell, share]), 0, _rows(each, part, low - start, high - start), False)


def _rows(each: PlannedTensor, part: int, low: int, high: int) -> Box:
    """Returns elements low to high of a part, whole rows of it, as a box."""
    box = as_box(each.pattern.parts[part])
    row = int(each.line.row[part])
    split = _split_dimension(box)
    if split is None:
        return box
    start = box[split][0]
    return (*box[:split], (start + low // row, start + high // row), *box[split + 1 :])


# ---- buckets ------------------------------------------------------------------------------------------------


def _buckets(slots: _Slots, limit: int) -> Iterator[Bucket]:
    for stage, phase, peer in sorted(slots):
        parts: list[Part] = []
        size = 0
        for whole, volume, item_bytes in slots[stage, phase, peer]:
            for part, more in _fitting(whole, volume, item_bytes, limit):
                if parts and size + more > limit:
                    yield Bucket(stage, phase, peer, tuple(parts), size)
                    parts = []
                    size = 0
                parts.append(part)
                size += more
        yield Bucket(stage, phase, peer, tuple(parts), size)


def _fitting(part: Part, volume: int, item_bytes: int, limit: int) -> Sequence[tuple[Part, int]]:
    """Returns the part, cut into parts that fit a bucket, with the bytes of each."""
    if volume * item_bytes <= limit:
        return [(part, volume * item_bytes)]
    boxes = bounded(part.box, limit // item_bytes)
    return [(part._replace(box=box), box_volume(box) * item_bytes) for box in boxes]


def bounded(box: Box, elements: int) -> Sequence[Box]:
    """Cuts a box into boxes of at most this many elements, but at least one."""
    split = _split_dimension(box)
    if split is None or box_volume(box) <= elements:
        return [box]
    start, stop = box[split]
    rows = max(1, elements * (stop - start) // box_volume(box))
    cut = [(*box[:split], (low, min(low + rows, stop)), *box[split + 1 :]) for low in range(start, stop, rows)]
    return [each for part in cut for each in bounded(part, elements)]


def _split_dimension(box: Box) -> int | None:
    """Returns the first dimension with several indices."""
    return next((dim for dim, (start, stop) in enumerate(box) if stop - start > 1), None)
