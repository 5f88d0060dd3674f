"""The parts in which a slot crosses a network, the same on both sides.

Parts follow the order of the slot. A codec that rounds has parts within one tensor, and leaves out tensors that do not
stand it, as their specification says: norms, biases, embeddings, output layers and routers.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from asyncrl.lanes.weights.codec.chunk import LOSSY, WireCodec
from asyncrl.lanes.weights.tensor_spec import WeightsSpec

CHUNK_BYTES = 2 << 20
"""Bytes of a part: they stay in the cache between digest and copy, and messages cost little beside them."""

START, SLOWEST = 5.0, 1e6
"""Seconds and bytes a second: what is not there after START and its bytes at SLOWEST does not come."""


def transfer_seconds(size: int) -> float:
    """Returns the seconds in which so many bytes must come."""
    return START + size / SLOWEST


@dataclass(frozen=True, slots=True)
class SlotPart:
    """Bytes [start, stop) of a slot, encoded by `codec`."""

    start: int
    stop: int
    codec: WireCodec

    @property
    def deadline(self) -> float:
        """Returns the seconds in which the part must come."""
        return transfer_seconds(self.stop - self.start)


@dataclass(frozen=True)
class ChunkPlan:
    """Holds the parts of a slot. `digest` is compared before weights move."""

    spec: WeightsSpec
    codec: WireCodec
    parts: tuple[SlotPart, ...]

    @classmethod
    def of(cls, spec: WeightsSpec, codec: WireCodec, chunk_bytes: int = CHUNK_BYTES) -> "ChunkPlan":
        """Plans a slot. chunk_bytes: of a part at most, a multiple of the alignment of tensors."""
        parts = [
            SlotPart(start, min(start + chunk_bytes, stop), kind)
            for begin, stop, kind in _stretches(spec, codec)
            for start in range(begin, stop, chunk_bytes)
        ]
        return cls(spec, codec, tuple(parts))

    @cached_property
    def digest(self) -> str:
        lines = [self.spec.digest.hex(), *(f"{part.start} {part.stop} {part.codec}" for part in self.parts)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def from_one(self) -> float:
        """Returns the seconds in which the whole slot must come from one sender."""
        return transfer_seconds(self.spec.size)

    @property
    def deadline(self) -> float:
        """Returns the seconds in which the whole slot must come, from another receiver or, where that one gives
        nothing, from the trainer."""
        return 2 * self.from_one


def _stretches(spec: WeightsSpec, codec: WireCodec) -> Iterator[tuple[int, int, WireCodec]]:
    """Yields start, stop and codec of what parts may not cross: tensors that are rounded, and all between them."""
    if codec not in LOSSY:
        yield 0, spec.size, codec
        return
    done = 0
    for tensor in spec.tensors:
        if tensor.bytes > 0 and not tensor.exact:
            if tensor.offset > done:
                yield done, tensor.offset, WireCodec.DENSE
            done = tensor.offset + tensor.bytes
            yield tensor.offset, done, codec
    if spec.size > done:
        yield done, spec.size, WireCodec.DENSE
