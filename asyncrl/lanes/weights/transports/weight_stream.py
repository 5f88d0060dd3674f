"""Versions of the weights over a network, pulled part by part.

WeightServer      answers receivers: at the trainer, and at every receiver for those below it
StreamSender      the trainer's side: writes versions into buffers that are served
StreamReceiver    the engine's side: pulls a version while the one before serves
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from asyncrl.concurrency import gather
from asyncrl.errors import DeadlineExceeded, PeerLost, Refused, WeightsError, WireError
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.shared_memory import Segment
from asyncrl.lanes.weights.chunk_codec import LOSSY, EncodedChunk, WireCodec, decode_chunk
from asyncrl.lanes.weights.leases import CopiedVersions, Fetched, Leases, slot_of
from asyncrl.lanes.weights.plan.routes_of_parts import CHILDREN, parent
from asyncrl.lanes.weights.slot_memory import check_digest, checked, digest, digested_tensor, fill, views, with_aliases
from asyncrl.lanes.weights.transports.held_version import ChunkPlan, HeldVersion, in_thread
from asyncrl.protocols.messages import Call, Hello, Published
from asyncrl.protocols.weight_transports import BUFFERS, SLOTS

# Answers receivers that pull versions of the weights: at the trainer, and at every receiver for those below it.
#
# trainer ── receiver 0 ── receivers 2, 3        The trainer answers `open_weights` with the parent in this tree; a
#    └────── receiver 1 ── receivers 4, 5        receiver passes on each part as soon as it has it.


OPEN = "open_weights"
CHUNK = "weights_chunk"
DONE = "close_weights"

Packed = tuple[int, int, Any, int, int, float]
"""A chunk as a message: kind, size, data, digest of the data, digest of the result, error."""


class WeightServer:
    """Serves versions at an address of its own, in a task of the group. held: versions that can be pulled, by number;
    the owner replaces the mapping, on any thread."""

    def __init__(
        self, wire: Wire, address: str, hello: Hello, tasks: asyncio.TaskGroup, *, heartbeat: float | None = None
    ) -> None:
        self.held: dict[int, HeldVersion] = {}
        listener = wire.listen(address)
        self.address = listener.address
        self._server = Server(listener, self._dispatch, hello, queued=False, heartbeat=heartbeat)
        self._serving = tasks.create_task(self._server.serve(), name="weights lane")

    def close(self) -> None:
        self._serving.cancel()

    def _dispatch(self, call: Call) -> Awaitable[Any]:
        if call.method in _ARGUMENTS and tuple(map(type, call.args)) in _ARGUMENTS[call.method]:
            answer: Awaitable[Any] = getattr(self, f"_{call.method}")(*call.args)
            return answer
        raise Refused(
            f"the weights lane answers {', '.join(_ARGUMENTS)}, not {call.method} with {len(call.args)} values"
        )

    async def _open_weights(self, incarnation: int, version: int, plan: str, reader: str, address: str) -> str:
        """Returns the address of the parent from which the reader pulls, "" for this one."""
        held = self._find(incarnation, version)
        if plan != held.plan.digest:
            raise Refused(
                f"{reader} cuts the weights into other parts than their sender: start trainer and engine with the same "
                "model folder, model.dtype, weights.codec and version of asyncrl"
            )
        self._note(held, reader)
        held.receivers.setdefault(reader, address)
        order = list(held.receivers)
        above = parent(order.index(reader), CHILDREN)
        return "" if above is None else held.receivers[order[above]]

    async def _weights_chunk(
        self, incarnation: int, version: int, number: int, base: int | None, reader: str
    ) -> Packed:
        held = self._find(incarnation, version)
        if not 0 <= number < len(held.plan.parts):
            raise Refused(f"there is no part {number} of the weights; there are {len(held.plan.parts)}")
        self._note(held, reader)
        return packed(await held.chunk(number, base))

    async def _close_weights(self, incarnation: int, version: int, reader: str) -> None:
        """Notes that a reader has the version, or gives it up."""
        if (held := self.held.get(version)) is not None and held.incarnation == incarnation:
            held.pulled_at.pop(reader, None)

    def _note(self, held: HeldVersion, reader: str) -> None:
        held.pulled_at[reader] = asyncio.get_running_loop().time()

    def _find(self, incarnation: int, version: int) -> HeldVersion:
        held = self.held.get(version)
        if held is None or held.incarnation != incarnation:
            have = ", ".join(str(number) for number in sorted(self.held)) or "none"
            raise Refused(f"weights of version {version} of incarnation {incarnation} are not here; versions: {have}")
        return held


_ARGUMENTS: dict[str, tuple[tuple[type, ...], ...]] = {
    OPEN: ((int, int, str, str, str),),
    CHUNK: ((int, int, int, int, str), (int, int, int, type(None), str)),
    DONE: ((int, int, str),),
}


def packed(chunk: EncodedChunk) -> Packed:
    return int(chunk.kind), chunk.size, chunk.data, chunk.data_digest, chunk.result_digest, chunk.error


def unpacked(message: Any) -> EncodedChunk:
    """Returns the chunk of a message. Raises Refused for any other message."""
    if type(message) is not tuple or tuple(map(type, message[:2])) != (int, int) or len(message) != 6:
        raise Refused(f"no chunk of weights: {message!r:.100}")
    kind, size, data, own, result, error = message
    if kind not in set(WireCodec) or getattr(data, "dtype", None) != "u1" or getattr(data, "ndim", 0) != 1:
        raise Refused(f"no chunk of weights: kind {kind}")
    return EncodedChunk(WireCodec(kind), size, data, own, result, error)


# The trainer's side of a network: versions in buffers of their own, so that the trainer waits for no receiver.
#
# Of three buffers one has the newest version, one the version that a slow receiver pulls or differences build on, and
# one is written. A receiver that is slower than two versions is finished first: of versions that are pulled, the
# oldest stays. Receivers of a version that is overwritten are refused, and take the newest.


class StreamSender:
    """Implements WeightSender over a wire: up to BUFFERS versions, which its server hands to whoever pulls.

    Invariant: what the server holds is whole; a version leaves it before its memory is overwritten, the oldest that
    nobody pulls first. The trainer's compute thread calls `write`, everything else runs on the event loop.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        wire: Wire,
        address: str,
        hello: Hello,
        tasks: asyncio.TaskGroup,
        *,
        heartbeat: float | None = None,
    ) -> None:
        self.leases: Leases = CopiedVersions()
        self.server = WeightServer(wire, address, hello, tasks, heartbeat=heartbeat)
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._buffers: list[Segment] = []
        self._stored: list[HeldVersion] = []  # oldest first

    def write(self, incarnation: int, version: int, named_tensors: Mapping[str, Tensor]) -> Published:
        """Implements WeightSender. Raises MemoryError when there is too little for a buffer."""
        spec = self._plan.spec
        tensors = checked(named_tensors, spec)
        memory = self._free_buffer()
        fill(views(memory.data, spec), tensors)
        before = self._stored[-1] if self._stored else None
        held = HeldVersion(self._plan, incarnation, version, memory)
        if before is not None and before.version < version:
            held.base = before
            held.base_version = before.version
        self._stored.append(held)
        self.server.held = {each.version: each for each in self._stored}
        digest_of = digested_tensor(spec, version)
        exact = "" if self._plan.codec in LOSSY else digest(memory.data, spec, digest_of)
        address = self.server.address
        seconds = self._plan.deadline
        return Published(incarnation, version, address, slot_of(version), exact, digest_of, transfer=seconds)

    def forget(self, reader: str) -> None:
        for held in self._stored:
            held.pulled_at.pop(reader, None)
            if reader in held.receivers:
                held.receivers[reader] = ""  # Its place stays, so that others keep theirs; the trainer stands in.

    def close(self) -> None:
        self.server.close()

    def _free_buffer(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if len(self._buffers) < BUFFERS:
            self._buffers.append(Segment.private(max(self._plan.spec.size, 1)))
            return np.frombuffer(self._buffers[-1].buffer, np.uint8)[: self._plan.spec.size]
        since = self._loop.time() - max((part.deadline for part in self._plan.parts), default=0.0)
        older = self._stored[:-1]
        pulled = [held for held in older if max(held.pulled_at.values(), default=since) > since]
        unused = [held for held in older if held not in pulled]
        victim = unused[0] if unused else pulled[-1]
        self._stored.remove(victim)
        self.server.held = {each.version: each for each in self._stored}
        victim.overwrite()
        return victim.memory


# The engine's side of a network: pulls a version part by part, while the version before serves.
#
#     fetch ── open at the trainer ── parts from the parent, several on their way ── memory of the idle slot
#                                     └─ from the trainer where the parent fails
#
# Parts that have arrived stay when a connection breaks. A part that comes damaged, or does not result in what its
# sender has, is asked for again without a base.


AT_ONCE = 4
"""Parts that a receiver waits for at once: while one is decoded, others travel and are encoded."""

TRIES = 3
"""Times that a part is asked for that comes damaged."""

HELLO_DEADLINE = 5.0
"""Seconds until a sender welcomes a receiver; then it is taken for dead."""


@dataclass(eq=False)
class StreamReceiver:
    """Implements WeightReceiver over a wire. address: where receivers below this one pull from it. at_once: parts that
    it waits for at once."""

    plan: ChunkPlan
    wire: Wire
    address: str
    hello: Hello
    tasks: asyncio.TaskGroup
    _: KW_ONLY
    heartbeat: float | None = None
    pulled_bytes: int = field(default=0, init=False)
    """Bytes that came over the wire so far."""
    largest_error: float = field(default=0.0, init=False)
    """The largest share of error of any part of the version fetched last."""

    def __post_init__(self) -> None:
        self.server = WeightServer(self.wire, self.address, self.hello, self.tasks, heartbeat=self.heartbeat)
        self._current: HeldVersion | None = None
        self._incoming: HeldVersion | None = None
        self._slots: list[Segment] = []
        self._clients: dict[str, Client] = {}

    async def fetch(self, published: Published) -> Fetched:
        if self._current is not None and _names(published, self._current):
            return Fetched()
        before = self.pulled_bytes
        try:
            async with asyncio.timeout(self.plan.deadline):
                await self._fetch(published)
        except TimeoutError as late:
            missing = len(self._incoming.missing) if self._incoming is not None else 0
            raise DeadlineExceeded(
                f"{missing} of {len(self.plan.parts)} parts of the weights of version {published.version} did not come "
                f"from {published.arena} within {self.plan.from_one:.0f} s"
            ) from late
        return Fetched(self.pulled_bytes - before, self.largest_error)

    def tensors(self, published: Published) -> dict[str, Tensor]:
        self.check(published)
        if self._incoming is not None and _names(published, self._incoming):
            self._current = self._incoming
            self._incoming = None
        assert self._current is not None
        return with_aliases(views(self._current.memory.data, self.plan.spec), self.plan.spec)

    def check(self, published: Published) -> None:
        if not any(each and each.whole and _names(published, each) for each in (self._current, self._incoming)):
            raise WeightsError(f"weights of version {published.version} were not fetched from {published.arena}")

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self.server.close()

    async def _fetch(self, published: Published) -> None:
        incoming = self._begin(published)
        try:
            await self._pull(incoming, published.arena)
        finally:
            if not incoming.whole:
                incoming.stop_arriving()
        try:
            await in_thread(self.plan.spec.size, lambda: check_digest(incoming.memory.data, self.plan.spec, published))
        except WeightsError:
            self._give_up()  # All parts are what the sender has; whoever fetches again gets them anew.
            raise

    def _give_up(self) -> None:
        """Forgets the version that is being pulled, with all its parts."""
        if self._incoming is not None:
            self._incoming.overwrite()
            self._incoming = None

    def _begin(self, published: Published) -> HeldVersion:
        """Returns the version to be pulled: the one that was begun before, or a new one in the idle slot."""
        if self._incoming is not None and _names(published, self._incoming):
            self._incoming.arriving = True
            return self._incoming
        self._give_up()
        used = None if self._current is None else self._current.memory
        while len(self._slots) < SLOTS:
            self._slots.append(Segment.private(max(self.plan.spec.size, 1)))
        memories = [np.frombuffer(slot.buffer, np.uint8)[: self.plan.spec.size] for slot in self._slots]
        idle = next(each for each in memories if used is None or each.ctypes.data != used.ctypes.data)
        for held in self.server.held.values():
            if held.memory.ctypes.data == idle.ctypes.data and not held.overwritten:
                held.overwrite()
        base = self._current
        number = None if base is None else base.version
        incoming = HeldVersion(
            self.plan, published.incarnation, published.version, idle, not self.plan.parts, number, base
        )
        self._incoming = incoming
        self.server.held = {each.version: each for each in (self._current, incoming) if each is not None}
        return incoming

    async def _pull(self, incoming: HeldVersion, root: str) -> None:
        """Pulls the missing parts from the parent, and from the trainer what the parent does not give in its time."""
        self.largest_error = 0.0
        version = (incoming.incarnation, incoming.version)
        opening = (*version, self.plan.digest, self.hello.instance, self.server.address)
        above = await (await self._client(root)).call(OPEN, opening, HELLO_DEADLINE)
        if above:
            with suppress(*_FAILED, TimeoutError, Refused, WeightsError):
                async with asyncio.timeout(self.plan.from_one):
                    await self._pull_from(above, incoming)
        async with asyncio.timeout(self.plan.from_one):
            try:
                await self._pull_from(root, incoming)
            except _FAILED:
                await self._pull_from(root, incoming)  # What is missing, on another connection.
        with suppress(*_FAILED):
            await (await self._client(root)).call(DONE, (*version, self.hello.instance), HELLO_DEADLINE)

    async def _pull_from(self, source: str, incoming: HeldVersion) -> None:
        client = await self._client(source)
        missing = deque(incoming.missing)

        async def pull() -> None:
            while missing:
                await self._pull_part(client, incoming, missing.popleft())

        try:
            await gather(*(pull() for _ in range(AT_ONCE)))
        except DeadlineExceeded as late:
            client.fail(str(late))
            raise

    async def _pull_part(self, client: Client, incoming: HeldVersion, number: int) -> None:
        base = incoming.base
        for left in reversed(range(TRIES)):
            asked = (incoming.incarnation, incoming.version, number, base and base.version, self.hello.instance)
            chunk = unpacked(await client.call(CHUNK, asked, self.plan.parts[number].deadline))
            try:
                decode = partial(self._decode, chunk, incoming, base, number)
                await in_thread(chunk.size, decode, dense=chunk.kind is WireCodec.DENSE)
            except WeightsError:
                if not left:
                    raise
                base = None
                continue
            self.pulled_bytes += len(chunk.data)
            self.largest_error = max(self.largest_error, chunk.error)
            return incoming.add(number, chunk)

    def _decode(self, chunk: EncodedChunk, incoming: HeldVersion, base: HeldVersion | None, number: int) -> None:
        before = None if base is None else base.bytes_of(number)
        decode_chunk(chunk, self.plan.spec.dtype, incoming.bytes_of(number), before)

    async def _client(self, address: str) -> Client:
        client = self._clients.get(address)
        if client is None or client.lost.is_set():
            for gone in [name for name, each in self._clients.items() if each.lost.is_set()]:
                self._clients.pop(gone).close()
            client = Client(
                self.wire.connect(address), self.hello, f"weights at {address}", queued=False, heartbeat=self.heartbeat
            )
            with ExitStack() as undo:
                undo.callback(client.close)
                await client.open(self.tasks, HELLO_DEADLINE)
                undo.pop_all()
            self._clients[address] = client
        return client


_FAILED = (PeerLost, DeadlineExceeded, WireError)
"""A sender that is gone, late, or sends what is no message."""


def _names(published: Published, held: HeldVersion) -> bool:
    return (held.incarnation, held.version) == (published.incarnation, published.version)
