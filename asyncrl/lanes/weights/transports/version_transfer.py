"""What all networks of weights share: the parts of a slot, the end of a lane, a version that can be sent part by part,
and a receiver of versions."""

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import DeadlineExceeded, PeerLost, Refused, WeightsError, WireError
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import Wakeup, Wire
from asyncrl.lanes.shared_memory import Segment
from asyncrl.lanes.weights.chunk_codec import LOSSY, EncodedChunk, WireCodec, encode_chunk
from asyncrl.lanes.weights.leases import Fetched
from asyncrl.lanes.weights.slot_memory import WeightsSpec, check_digest, views, with_aliases
from asyncrl.protocols.messages import Call, Hello, Published

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

    def refuse_other(self, digest: str, reader: str) -> None:
        """Raises Refused for a reader with another plan."""
        if digest != self.digest:
            raise Refused(
                f"{reader} cuts the weights into other parts than their sender: start trainer and engine with the same "
                "model folder, model.dtype, weights.codec and version of asyncrl"
            )

    @property
    def from_one(self) -> float:
        """Returns the seconds in which the whole slot must come from one sender."""
        return transfer_seconds(self.spec.size)


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
    def block(self) -> Tensor:
        return torch.from_numpy(self.memory)

    @property
    def missing(self) -> list[int]:
        """Returns the numbers of the parts that have not arrived."""
        return [] if self.whole else [number for number in range(len(self.plan.parts)) if not self._has(number)]

    def note_sign(self, reader: str) -> None:
        """Notes on the event loop that a receiver pulls the version."""
        self.pulled_at[reader] = asyncio.get_running_loop().time()

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


def new_memory(spec: WeightsSpec) -> Bytes:
    """Returns the memory of a slot, of which pages are allocated when they are first written."""
    return np.frombuffer(Segment.private(max(spec.size, 1)).buffer, np.uint8)[: spec.size]


async def in_thread(size: int, work: Callable[[], T], *, dense: bool = False) -> T:
    """Runs work on `size` bytes beside the event loop, or on it where they are few. dense: whether the bytes are only
    digested and copied."""
    if size <= (DENSE_INLINE_BYTES if dense else INLINE_BYTES):
        return work()
    return await asyncio.get_running_loop().run_in_executor(_thread, work)


# One end of the lane: what it answers over the encrypted control wire, and its connections to other ends.


FAILED = (PeerLost, DeadlineExceeded, WireError)
"""A sender that is gone, late, or sends what is no message."""

CallTypes = Mapping[str, Sequence[tuple[type, ...]]]
"""Calls that an end answers, with the combinations of types that their arguments may have."""


@dataclass(eq=False)
class LaneEnd:
    """Holds the control wire of one end, for its sender or receiver alone. All methods are for the event loop.

    address: where it listens; after `serve`, without a `*` for the port. tasks: they end with the worker. Invariant:
    each address has one connection, which is replaced once it is lost.
    """

    wire: Wire
    address: str
    hello: Hello
    tasks: asyncio.TaskGroup
    heartbeat: float | None = None

    def __post_init__(self) -> None:
        self.clients: dict[str, Client] = {}
        self._serving: asyncio.Task[None] | None = None

    def serve(self, owner: object, arguments: CallTypes) -> None:
        """Answers calls by the owner's methods of these names."""

        def dispatch(call: Call) -> Awaitable[Any]:
            if tuple(map(type, call.args)) not in arguments.get(call.method, ()):
                known = ", ".join(arguments)
                raise Refused(f"the weights lane answers {known}, not {call.method} with these {len(call.args)} values")
            answer: Awaitable[Any] = getattr(owner, call.method)(*call.args)
            return answer

        listener = self.wire.listen(self.address)
        self.address = listener.address
        server = Server(listener, dispatch, self.hello, queued=False, heartbeat=self.heartbeat)
        self._serving = self.tasks.create_task(server.serve(), name="weights lane")

    async def client(self, address: str, deadline: float) -> Client:
        """Returns the connection to another end. deadline: seconds until that welcomes this one."""
        client = self.clients.get(address)
        if client is None or client.lost.is_set():
            for gone in [name for name, each in self.clients.items() if each.lost.is_set()]:
                self.clients.pop(gone).close()
            client = Client(
                self.wire.connect(address), self.hello, f"weights at {address}", queued=False, heartbeat=self.heartbeat
            )
            with ExitStack() as undo:
                undo.callback(client.close)
                await client.open(self.tasks, deadline)
                undo.pop_all()
            self.clients[address] = client
        return client

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        if self._serving is not None:
            self._serving.cancel()


class Arriving(Protocol):
    """A version in a block of its own that may not be there as a whole."""

    incarnation: int
    version: int

    @property
    def whole(self) -> bool: ...

    @property
    def missing(self) -> Sequence[int]: ...

    @property
    def block(self) -> Tensor: ...


def is_of(published: Published, held: Arriving) -> bool:
    return (held.incarnation, held.version) == (published.incarnation, published.version)


V = TypeVar("V", bound=Arriving)


class VersionReceiver(ABC, Generic[V]):
    """Implements WeightReceiver over a network, with one version in use and one that arrives.

    received_bytes: that came over the network so far. largest_error: the largest share of rounding of any part of the
    version fetched last. Invariant: the block of the version in use is not written before `tensors` has returned the
    next one. The event loop fetches; the compute thread of the engine takes tensors.
    """

    senders: ClassVar[int] = 1
    """Senders that are tried in turn."""
    reopens = True

    def __init__(self, plan: ChunkPlan) -> None:
        self.plan = plan
        self.received_bytes = 0
        self.largest_error = 0.0
        self._current: V | None = None
        self._incoming: V | None = None

    async def fetch(self, published: Published) -> Fetched:
        if self._current is not None and is_of(published, self._current):
            return Fetched()
        before = self.received_bytes
        self.largest_error = 0.0
        incoming = self._begin(published)
        try:
            async with asyncio.timeout(self.senders * self.plan.from_one):
                await self._fetch(incoming, published)
        except TimeoutError as late:
            parts = f"{len(incoming.missing)} of {len(self.plan.parts)} parts"
            raise DeadlineExceeded(
                f"{parts} of the weights of version {published.version} did not come from {published.arena} within "
                f"{self.plan.from_one:.0f} s"
            ) from late
        return Fetched(self.received_bytes - before, self.largest_error)

    def tensors(self, published: Published) -> dict[str, Tensor]:
        self.check(published)
        if self._incoming is not None and is_of(published, self._incoming):
            self._use(self._incoming)
            self._incoming = None
        assert self._current is not None
        return with_aliases(views(self._current.block, self.plan.spec), self.plan.spec)

    def check(self, published: Published) -> None:
        if not any(each and each.whole and is_of(published, each) for each in (self._current, self._incoming)):
            raise WeightsError(f"weights of version {published.version} were not fetched from {published.arena}")

    async def _fetch(self, incoming: V, published: Published) -> None:
        await self._bring(incoming, published.arena)
        try:
            await in_thread(self.plan.spec.size, lambda: check_digest(incoming.block, self.plan.spec, published))
        except WeightsError:
            self._give_up()  # All parts are what the sender has; whoever fetches again gets them anew.
            raise

    def _use(self, version: V) -> None:
        self._current = version

    @abstractmethod
    def _begin(self, published: Published) -> V:
        """Returns the version that arrives: the one that was begun before, or a new one."""

    @abstractmethod
    async def _bring(self, incoming: V, sender: str) -> None:
        """Brings the parts that are missing."""

    @abstractmethod
    def _give_up(self) -> None:
        """Forgets the version that arrives, with all its parts."""
