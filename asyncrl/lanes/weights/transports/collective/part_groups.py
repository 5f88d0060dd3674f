"""Groups of parts that cross a pair at once, the same on both sides, with their deadlines."""

from collections.abc import Iterator
from typing import NamedTuple

from asyncrl.lanes.weights.transports.chunk_plan import ChunkPlan, SlotPart, transfer_seconds
from asyncrl.lanes.weights.transports.collective.communicator import GROUP_PARTS


class PartGroup(NamedTuple):
    """Parts that are posted together. stop: number of the part behind them. seconds: in which they must come."""

    parts: tuple[SlotPart, ...]
    stop: int
    seconds: float


def groups(plan: ChunkPlan, first: int) -> Iterator[PartGroup]:
    """Yields the parts from number `first` on."""
    for start in range(first, len(plan.parts), GROUP_PARTS):
        parts = plan.parts[start : start + GROUP_PARTS]
        size = sum(part.stop - part.start for part in parts)
        yield PartGroup(parts, start + len(parts), transfer_seconds(size))
