"""A version of the weights that can be sent part by part: the trainer's is whole, a receiver's may still arrive."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import Refused
from asyncrl.lanes.control.wire import Wakeup
from asyncrl.lanes.weights.chunk_codec import LOSSY, EncodedChunk, WireCodec, encode_chunk
from asyncrl.lanes.weights.slot_memory import WeightsSpec

# The parts in which a slot crosses a network, the same on both sides.
#
# Parts follow the order of the slot. A codec that rounds has parts within one tensor, and leaves out tensors that do
# not stand it, as their specification says: norms, biases, embeddings, output layers and routers.


CHUNK_BYTES = 2 << 20
"""Bytes of a part: they stay in the cache between digest and copy, and messages cost little beside them."""

START = 5.0
SLOWEST = 1e6
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


Bytes = NDArray[np.uint8]
T = TypeVar("T")

INLINE_BYTES = 64 << 10
DENSE_INLINE_BYTES = 4 << 20
"""Sizes of a part up to which it is encoded and decoded on the event loop, the second where it is only digested and
copied: 2 MiB take 0.13 and 0.37 ms, and to hand them to a thread takes 0.1 ms on either side."""

_thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
"""Starts its thread at its first use. It is not the compute thread, on which a step may take minutes."""


@dataclass(eq=False)
class HeldVersion:
    """A version in `memory`, which has the size of a slot.

    whole: whether all parts are there. arriving: whether what is missing may still come. base_version: what differences
    build on; base: that version, where differences are made here. overwritten: whether the memory is used for another
    version. receivers: name and address of those that asked for it, in the order in which they came. pulled_at: loop
    time of the last sign of those that pull it.
    """

    plan: ChunkPlan
    incarnation: int
    version: int
    memory: Bytes
    whole: bool = True
    base_version: int | None = None
    base: "HeldVersion | None" = None
    overwritten: bool = False
    arriving: bool = True
    receivers: dict[str, str] = field(default_factory=dict)
    pulled_at: dict[str, float] = field(default_factory=dict)
    _encoded: dict[tuple[int, bool], EncodedChunk] = field(default_factory=dict)
    """Parts by number, and whether they build on the base."""

    def __post_init__(self) -> None:
        self._changed = Wakeup()
        self._written_here = self.whole
        self._absent = 0 if self.whole else len(self.plan.parts)

    @property
    def missing(self) -> list[int]:
        """Returns the numbers of the parts that have not arrived."""
        return [] if self.whole else [number for number in range(len(self.plan.parts)) if not self._has(number)]

    def bytes_of(self, number: int) -> Bytes:
        part = self.plan.parts[number]
        return self.memory[part.start : part.stop]

    async def chunk(self, number: int, base: int | None) -> EncodedChunk:
        """Returns a part in the form that travels, once it is there. base: version that the receiver can build on;
        None: it gets the part without one. Raises Refused when the memory is used for another version by then, or the
        part does not come."""
        while self.arriving and not (self.overwritten or self.whole or self._has(number)):
            await self._changed.wait()
        self._check()
        if not (self.whole or self._has(number)):
            raise Refused(f"part {number} of version {self.version} of incarnation {self.incarnation} does not come")
        codec = self.plan.parts[number].codec
        built = codec is WireCodec.SPARSE and base is not None and base == self.base_version
        found = self._encoded.get((number, built))
        if found is None and not self._written_here:
            found = self._encoded.get((number, False))  # Passed on as it came.
        if found is None:
            dense = codec not in LOSSY and not (built and self.base is not None)
            found = await in_thread(len(self.bytes_of(number)), lambda: self._encode(number, built), dense=dense)
            self._check()
        return found

    def add(self, number: int, chunk: EncodedChunk) -> None:
        """Notes on the event loop that a part is in the memory. Of dense bytes only those are kept."""
        if chunk.kind is WireCodec.DENSE:
            own = self.bytes_of(number)
            chunk = EncodedChunk(chunk.kind, chunk.size, own, chunk.data_digest, chunk.result_digest)
        self._absent -= not self._has(number)
        self._encoded[number, chunk.kind is WireCodec.SPARSE] = chunk
        self.whole = self._absent == 0
        self._changed.wake()

    def stop_arriving(self) -> None:
        """Notes on the event loop that nobody pulls what is missing: whoever waits for it is sent to the trainer."""
        self.arriving = False
        self._changed.wake()

    def overwrite(self) -> None:
        """Ends the version, because its memory is used for another. May be called on any thread once it is whole."""
        self.overwritten = True
        self.base = None
        self._encoded = {}
        if not self.whole:
            self._changed.wake()

    def _has(self, number: int) -> bool:
        return (number, True) in self._encoded or (number, False) in self._encoded

    def _encode(self, number: int, built: bool) -> EncodedChunk:
        codec = self.plan.parts[number].codec
        old = self.base if built else None
        if old is not None:
            found = encode_chunk(codec, self.bytes_of(number), self.plan.spec.dtype, old.bytes_of(number))
            if not old.overwritten:
                self._encoded[number, True] = found
                return found
        found = encode_chunk(codec, self.bytes_of(number), self.plan.spec.dtype)
        self._encoded[number, False] = found
        return found

    def _check(self) -> None:
        if self.overwritten:
            raise Refused(f"version {self.version} of incarnation {self.incarnation} was overwritten")


async def in_thread(size: int, work: Callable[[], T], *, dense: bool = False) -> T:
    """Runs work on `size` bytes beside the event loop, or on it where they are few. dense: whether the bytes are only
    digested and copied."""
    if size <= (DENSE_INLINE_BYTES if dense else INLINE_BYTES):
        return work()
    return await asyncio.get_running_loop().run_in_executor(_thread, work)
