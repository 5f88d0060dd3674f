"""Carries out a plan in memory, slot by slot, and compares what arrives with slices of the whole tensors."""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from asyncrl.lanes.weights.plan.placements import Box, CheckpointTensor, Placement, as_box, box_volume, intersection
from asyncrl.lanes.weights.plan.schedule import Bucket, Part, RankSchedule, schedule_of
from asyncrl.lanes.weights.plan.weight_plan import WeightPlan

Placements = Mapping[str, Placement]
Memory = dict[str, np.ndarray]
"""Tensors as a whole, 0 where a rank has nothing."""


class SimulatedTransfer:
    """Holds the memory of all ranks; `writes` counts how often each element was written."""

    def __init__(self, plan: WeightPlan, source: Placements, destination: Placements) -> None:
        self.plan = plan
        self.schedules = dict(enumerate(all_schedules(plan)))
        self.tensors = [each.tensor for each in plan.tensors]
        self.whole = whole_tensors(self.tensors)
        self.held = {rank: self._masked(rank, source) for rank in self.schedules}
        self.needed = {rank: self._masked(rank, destination) for rank in self.schedules}
        self.received = {rank: self._empty() for rank in self.schedules}
        self.writes = {rank: self._empty() for rank in self.schedules}

    def _masked(self, rank: int, placements: Placements) -> Memory:
        """Returns what a placement gives to a rank."""
        return {
            each.name: np.asarray(self.whole[each.name] * masks(each, placements[each.name]).get(rank, False))
            for each in self.tensors
        }

    def _empty(self) -> Memory:
        return {name: np.zeros_like(tensor) for name, tensor in self.whole.items()}

    def run(self) -> None:
        for rank, schedule in self.schedules.items():
            for part in schedule.copies:
                self._write(rank, part, self._read(rank, part))
        slots = sorted({(bucket.stage, bucket.phase) for each in self.schedules.values() for bucket in each.sends})
        for slot in slots:
            self._run_slot(slot)

    def _run_slot(self, slot: tuple[int, int]) -> None:
        sends = {rank: at_slot(schedule.sends, slot) for rank, schedule in self.schedules.items()}
        receives = {rank: at_slot(schedule.receives, slot) for rank, schedule in self.schedules.items()}
        for buckets in [*sends.values(), *receives.values()]:
            assert len({bucket.peer for bucket in buckets}) <= 1, f"a rank has two partners at once in slot {slot}"
        messages = {
            (rank, bucket.peer, number): [(part, self._read(rank, part)) for part in bucket.parts]
            for rank, buckets in sends.items()
            for number, bucket in enumerate(buckets)
        }
        for rank, buckets in receives.items():
            for number, bucket in enumerate(buckets):
                message = messages.pop((bucket.peer, rank, number))
                assert tuple(part for part, _ in message) == bucket.parts
                for part, values in message:
                    self._write(rank, part, values)
        assert not messages, f"sent in slot {slot}, and received by nobody: {list(messages)}"

    def _read(self, rank: int, part: Part) -> np.ndarray:
        memory = self.received if part.relayed else self.held
        values = sliced(memory[rank][part.tensor], part.box).copy()
        assert values.all(), "sent before it was received, or by a rank that does not hold it"
        return values

    def _write(self, rank: int, part: Part, values: np.ndarray) -> None:
        sliced(self.received[rank][part.tensor], part.box)[...] = values
        sliced(self.writes[rank][part.tensor], part.box)[...] += 1

    def check(self) -> None:
        """Every element is there, is right, and was written once; nothing else was."""
        for rank, needed in self.needed.items():
            for name, expected in needed.items():
                np.testing.assert_array_equal(self.received[rank][name], expected)
                np.testing.assert_array_equal(self.writes[rank][name], expected > 0)

    def bytes_sent(self, *, relayed: bool) -> list[int]:
        item_bytes = {tensor.name: tensor.item_bytes for tensor in self.tensors}
        return [
            sum(
                box_volume(part.box) * item_bytes[part.tensor]
                for bucket in schedule.sends
                for part in bucket.parts
                if part.relayed == relayed
            )
            for schedule in self.schedules.values()
        ]


def lower_bound(tensors: Sequence[CheckpointTensor], source: Placements, destination: Placements) -> int:
    """Counts element by element what ranks need and do not hold, in bytes."""
    total = 0
    for tensor in tensors:
        held = masks(tensor, source[tensor.name])
        needed = masks(tensor, destination[tensor.name])
        for rank, need in needed.items():
            total += int((need & ~held.get(rank, np.zeros_like(need))).sum()) * tensor.item_bytes
    return total


def masks(tensor: CheckpointTensor, placement: Placement) -> dict[int, np.ndarray]:
    held = placement.held(tensor.shape)
    found = dict[int, np.ndarray]()
    for bounds, rank in zip(held.bounds, held.ranks.tolist(), strict=True):
        found.setdefault(rank, np.zeros(tensor.shape, bool))
        found[rank][tuple(slice(start, stop) for start, stop in as_box(bounds))] = True
    return found


def least_largest_sender(plan: WeightPlan) -> float:
    """Returns the bytes of the busiest sender in the best plan: over all sets of ranks, what only they hold divided by
    their number (Hall's theorem for divisible work)."""
    work: dict[int, int] = {}
    for each in plan.tensors:
        for cell, ranks in enumerate(each.pattern.holders.tolist()):
            length = int(each.line.cell_start[cell + 1] - each.line.cell_start[cell]) * each.pattern.item_bytes
            mask = sum(1 << rank for rank in ranks if rank >= 0)
            work[mask] = work.get(mask, 0) + length
    every = range(1, 1 << plan.ranks)
    return max(sum(size for mask, size in work.items() if not mask & ~group) / group.bit_count() for group in every)


def at_slot(buckets: Sequence[Bucket], slot: tuple[int, int]) -> list[Bucket]:
    return [bucket for bucket in buckets if (bucket.stage, bucket.phase) == slot]


def sliced(whole: np.ndarray, box: Box) -> np.ndarray:
    return whole[(*(slice(start, stop) for start, stop in box), ...)]


def whole_tensors(tensors: Sequence[CheckpointTensor]) -> dict[str, np.ndarray]:
    """Gives every element of every tensor a value of its own."""
    found = {}
    first = 1
    for tensor in tensors:
        size = prod(tensor.shape)
        found[tensor.name] = np.arange(first, first + size).reshape(tensor.shape)
        first += size
    return found


def all_schedules(plan: WeightPlan) -> list[RankSchedule]:
    return [schedule_of(plan, rank) for rank in range(plan.ranks)]


def cover(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Tells whether boxes are disjoint and cover a tensor."""
    apart = all(intersection(a, b) is None for n, a in enumerate(boxes) for b in boxes[:n])
    return apart and sum(map(box_volume, boxes)) == prod(shape)
