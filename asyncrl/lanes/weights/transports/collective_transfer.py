"""Versions of the weights over pairs of ranks, from the trainer to each engine.

groups, LinkServer    what both sides share: groups of parts, and calls over the encrypted control wire
CollectiveSender      the trainer's side: sends each version from a block of its own
CollectiveReceiver    the engine's side: receives into its idle block
"""

import asyncio
from collections.abc import Awaitable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from asyncrl.errors import DeadlineExceeded, PeerLost, Refused, WeightsError, WireError
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.weights.leases import CopiedVersions, Fetched, Leases, slot_of
from asyncrl.lanes.weights.slot_memory import (
    block_digest,
    block_views,
    check_block_digest,
    checked,
    digested_tensor,
    fill,
    new_block,
    with_aliases,
)
from asyncrl.lanes.weights.transports.communicator import (
    CONNECT_SECONDS,
    GROUP_PARTS,
    RECEIVER,
    TRAINER,
    Backend,
    Communicator,
    OwnerThread,
)
from asyncrl.lanes.weights.transports.held_version import ChunkPlan, SlotPart, in_thread, transfer_seconds
from asyncrl.protocols.messages import Call, Hello, Published
from asyncrl.protocols.weight_transports import BUFFERS

# Groups of parts that cross a pair at once, the same on both sides, with their deadlines.


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


# Answers receivers over the encrypted control wire: who meets where, what is to be sent, and whether it was whole.
#
# join_pair ── send_version ── (the pair moves the bytes) ── confirm_version ... leave_pair


JOIN = "join_pair"
SEND = "send_version"
CONFIRM = "confirm_version"
LEAVE = "leave_pair"

_ARGUMENTS: dict[str, tuple[type, ...]] = {
    JOIN: (str, str),
    SEND: (int, int, int, str),
    CONFIRM: (int, int),
    LEAVE: (str,),
}


class PairCalls(Protocol):
    """The calls that a sender answers to its receivers, on the event loop."""

    async def join_pair(self, plan: str, reader: str) -> str:
        """Begins a new pair with the reader in place of its former one, and returns where both meet. Raises Refused
        when the reader plans other parts."""

    async def send_version(self, incarnation: int, version: int, first: int, reader: str) -> None:
        """Begins to send the parts of a version from number `first` on. Raises Refused when the version is not here,
        or the reader has no pair."""

    async def confirm_version(self, incarnation: int, version: int) -> None:
        """Raises Refused when the version was overwritten, maybe while it was sent."""

    async def leave_pair(self, reader: str) -> None: ...


class LinkServer:
    """Serves calls at an address of its own, in a task of the group."""

    def __init__(
        self,
        calls: PairCalls,
        wire: Wire,
        address: str,
        hello: Hello,
        tasks: asyncio.TaskGroup,
        *,
        heartbeat: float | None = None,
    ) -> None:
        self._calls = calls
        listener = wire.listen(address)
        self.address = listener.address
        server = Server(listener, self._dispatch, hello, queued=False, heartbeat=heartbeat)
        self._serving = tasks.create_task(server.serve(), name="weights lane")

    def close(self) -> None:
        self._serving.cancel()

    def _dispatch(self, call: Call) -> Awaitable[Any]:
        if _ARGUMENTS.get(call.method) != tuple(map(type, call.args)):
            raise Refused(f"the weights lane answers {', '.join(_ARGUMENTS)}, not {call.method} with these values")
        answer: Awaitable[Any] = getattr(self._calls, call.method)(*call.args)
        return answer


# The trainer's side: versions in blocks of their own, sent to each receiver by the thread of its pair.
#
# The trainer waits for no receiver. When it needs the block of a version that is being sent, the version is marked as
# overwritten first: its senders stop, and a receiver that has all bytes by then is refused when it asks for the
# confirmation, so that it uses no version in which two are mixed.


@dataclass(eq=False)
class SentVersion:
    """A version in a block. readers: those to which it is being sent."""

    incarnation: int
    version: int
    block: Tensor
    overwritten: bool = False
    readers: set[str] = field(default_factory=set)


@dataclass(eq=False)
class PairThread:
    """The trainer's end of one pair. connected: its communicator, once both ends have met. Only the thread uses it."""

    reader: str
    thread: OwnerThread
    connected: "Future[Communicator]"

    @property
    def failed(self) -> bool:
        return self.connected.done() and self.connected.exception() is not None

    def end(self) -> None:
        """Aborts what is under way, and lets the thread free the communicator and end."""
        if self.connected.done() and self.connected.exception() is None:
            self.connected.result().abort()
        self.thread.submit(self._close)
        self.thread.close()

    def _close(self) -> None:
        if self.connected.exception() is None:
            self.connected.result().close()


class CollectiveSender:
    """Implements WeightSender, and PairCalls: versions in blocks of their own, a pair with its thread for each reader.

    Invariant: a version is marked as overwritten before its block is, so that no reader of it is confirmed afterwards.
    The trainer's compute thread calls `write`; the calls of readers and the ends of transfers run on the event loop.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        scheme: str,
        backend: Backend,
        wire: Wire,
        address: str,
        hello: Hello,
        tasks: asyncio.TaskGroup,
        *,
        heartbeat: float | None = None,
    ) -> None:
        self.leases: Leases = CopiedVersions()
        self._plan = plan
        self._backend = backend
        self._server = LinkServer(self, wire, address, hello, tasks, heartbeat=heartbeat)
        self.address = scheme + self._server.address
        self._blocks: list[Tensor] = []
        self._stored: list[SentVersion] = []  # oldest first; replaced, never changed
        self._pairs: dict[str, PairThread] = {}

    def write(self, incarnation: int, version: int, named_tensors: Mapping[str, Tensor]) -> Published:
        """Implements WeightSender. Raises what torch raises when the device has too little memory for a block."""
        spec = self._plan.spec
        tensors = checked(named_tensors, spec)
        block = self._free_block()
        fill(block_views(block, spec), tensors)
        digest_of = digested_tensor(spec, version)
        found = block_digest(block, spec, digest_of)
        self._stored = [*self._stored, SentVersion(incarnation, version, block)]
        slot = slot_of(version)
        seconds = self._plan.from_one
        return Published(incarnation, version, self.address, slot, found, digest_of, transfer=seconds)

    def forget(self, reader: str) -> None:
        if (pair := self._pairs.pop(reader, None)) is not None:
            pair.end()

    def close(self) -> None:
        for reader in list(self._pairs):
            self.forget(reader)
        self._backend.close()
        self._server.close()

    async def join_pair(self, plan: str, reader: str) -> str:
        if plan != self._plan.digest:
            raise Refused(
                f"{reader} cuts the weights into other parts than their sender: start trainer and engine with the same "
                "model folder, model.dtype and version of asyncrl"
            )
        self.forget(reader)
        meeting = self._backend.invite()
        thread = OwnerThread(f"weights to {reader}")
        connected = thread.submit(lambda: self._backend.connect(meeting, TRAINER, CONNECT_SECONDS))
        self._pairs[reader] = PairThread(reader, thread, connected)
        return meeting

    async def send_version(self, incarnation: int, version: int, first: int, reader: str) -> None:
        held = self._find(incarnation, version)
        pair = self._pairs.get(reader)
        if pair is None or pair.failed:
            raise PeerLost(f"{reader} has no pair with the trainer any more")
        held.readers.add(reader)
        sending = pair.thread.submit(lambda: self._send(pair, held, first))
        loop = asyncio.get_running_loop()
        sending.add_done_callback(lambda done: loop.call_soon_threadsafe(self._sent, pair, held, done))

    async def confirm_version(self, incarnation: int, version: int) -> None:
        self._find(incarnation, version)

    async def leave_pair(self, reader: str) -> None:
        self.forget(reader)

    def _send(self, pair: PairThread, held: SentVersion, first: int) -> None:
        communicator = pair.connected.result()
        for group in groups(self._plan, first):
            if held.overwritten:
                raise Refused(f"version {held.version} was overwritten while it was sent to {pair.reader}")
            communicator.send([held.block[part.start : part.stop] for part in group.parts], group.seconds)

    def _sent(self, pair: PairThread, held: SentVersion, done: "Future[None]") -> None:
        """Ends a pair that failed, so that its receiver notices; what failed is the receiver's to report."""
        held.readers.discard(pair.reader)
        if not done.cancelled() and done.exception() is not None and self._pairs.get(pair.reader) is pair:
            self.forget(pair.reader)

    def _find(self, incarnation: int, version: int) -> SentVersion:
        for held in self._stored:
            if (held.incarnation, held.version) == (incarnation, version) and not held.overwritten:
                return held
        have = ", ".join(str(held.version) for held in self._stored) or "none"
        raise Refused(f"weights of version {version} of incarnation {incarnation} are not here; versions: {have}")

    def _free_block(self) -> Tensor:
        """Returns a block that no version uses: a new one, or that of an older version. Of those that are sent, the
        oldest stays, so that a slow receiver ends."""
        if len(self._blocks) < BUFFERS:
            self._blocks.append(new_block(self._plan.spec, self._backend.device))
            return self._blocks[-1]
        older = self._stored[:-1]
        unused = [held for held in older if not held.readers]
        victim = unused[0] if unused else older[-1]
        victim.overwritten = True
        self._stored = [held for held in self._stored if held is not victim]
        return victim.block


# The engine's side: receives a version into its idle block, while the version before serves.
#
#     fetch ── join, once ── send version from part n on ── groups of parts on the pair's thread ── confirm ── digest
#
# Parts that have arrived stay when the pair breaks, and the rest comes over another pair. A block that a transfer may
# still write to, because whoever waited gave up, is left to that transfer and not used again.


CALL_DEADLINE = 5.0
"""Seconds until the trainer answers a call, which moves no weights; then it is taken for dead."""

_FAILED = (PeerLost, DeadlineExceeded, WireError)
"""A trainer that is gone, late, or sends what is no message."""


@dataclass(eq=False)
class _Version:
    """A version in a block. arrived: parts that are there, in order from the first."""

    incarnation: int
    version: int
    block: Tensor
    arrived: int = 0

    def is_of(self, published: Published) -> bool:
        return (self.incarnation, self.version) == (published.incarnation, published.version)


class _Pair(NamedTuple):
    thread: OwnerThread
    communicator: Communicator


@dataclass(eq=False)
class CollectiveReceiver:
    """Implements WeightReceiver. scheme: what stands before the address of the trainer's control wire."""

    plan: ChunkPlan
    scheme: str
    backend: Backend
    wire: Wire
    hello: Hello
    tasks: asyncio.TaskGroup
    _: KW_ONLY
    heartbeat: float | None = None

    def __post_init__(self) -> None:
        self._current: _Version | None = None
        self._incoming: _Version | None = None
        self._idle: list[Tensor] = []
        self._client: Client | None = None
        self._pair: _Pair | None = None

    async def fetch(self, published: Published) -> Fetched:
        if self._current is not None and self._current.is_of(published):
            return Fetched()
        incoming = self._begin(published)
        before = self._arrived_bytes(incoming)
        try:
            async with asyncio.timeout(self.plan.from_one):
                await self._fetch(incoming, published)
        except TimeoutError as late:
            raise DeadlineExceeded(
                f"{incoming.arrived} of {len(self.plan.parts)} parts of the weights of version {published.version} "
                f"came from {published.arena} within {self.plan.from_one:.0f} s"
            ) from late
        return Fetched(self._arrived_bytes(incoming) - before)

    def tensors(self, published: Published) -> dict[str, Tensor]:
        self.check(published)
        if self._incoming is not None and self._incoming.is_of(published):
            if self._current is not None:
                self._idle.append(self._current.block)
            self._current = self._incoming
            self._incoming = None
        assert self._current is not None
        return with_aliases(block_views(self._current.block, self.plan.spec), self.plan.spec)

    def check(self, published: Published) -> None:
        held = (self._current, self._incoming)
        if not any(each and each.arrived == len(self.plan.parts) and each.is_of(published) for each in held):
            raise WeightsError(f"weights of version {published.version} were not fetched from {published.arena}")

    def close(self) -> None:
        self._end_pair()
        if self._client is not None:
            self._client.close()

    def _begin(self, published: Published) -> _Version:
        """Returns the version to be received: the one that was begun before, or a new one in the idle block."""
        if self._incoming is not None and self._incoming.is_of(published):
            return self._incoming
        self._give_up()
        block = self._idle.pop() if self._idle else new_block(self.plan.spec, self.backend.device)
        self._incoming = _Version(published.incarnation, published.version, block)
        return self._incoming

    def _give_up(self) -> None:
        """Forgets the version that was being received; no transfer writes to its block."""
        if self._incoming is not None:
            self._idle.append(self._incoming.block)
            self._incoming = None

    async def _fetch(self, incoming: _Version, published: Published) -> None:
        try:
            await self._receive(incoming, published)
        except _FAILED:
            await self._receive(incoming, published)  # What is missing, over another pair.
        try:
            await in_thread(self.plan.spec.size, lambda: check_block_digest(incoming.block, self.plan.spec, published))
        except WeightsError:
            self._give_up()  # All parts are what the trainer has; whoever fetches again gets them anew.
            raise

    async def _receive(self, incoming: _Version, published: Published) -> None:
        """Receives the missing parts. Ends the pair when that fails, but for a version that the trainer refuses."""
        version = (incoming.incarnation, incoming.version)
        client = await self._control(published.arena.removeprefix(self.scheme))
        if incoming.arrived < len(self.plan.parts):
            pair = self._pair or await self._join(client, version)
            with ExitStack() as failing:
                failing.callback(self._end_pair)
                try:
                    await client.call(SEND, (*version, incoming.arrived, self.hello.instance), CALL_DEADLINE)
                    await self._receive_parts(pair, incoming)
                except _FAILED:
                    await self._leave(client)
                    raise
                failing.pop_all()
        try:
            await client.call(CONFIRM, version, CALL_DEADLINE)
        except Refused:
            incoming.arrived = 0  # Its parts may be of two versions.
            raise

    async def _receive_parts(self, pair: _Pair, incoming: _Version) -> None:
        """Receives on the thread of the pair. Who is cancelled leaves the block to the transfer."""
        receiving = pair.thread.submit(lambda: self._fill(pair.communicator, incoming))
        try:
            await asyncio.wrap_future(receiving)
        finally:
            if not receiving.done():
                self._incoming = None

    def _fill(self, communicator: Communicator, incoming: _Version) -> None:
        for group in groups(self.plan, incoming.arrived):
            communicator.receive([incoming.block[part.start : part.stop] for part in group.parts], group.seconds)
            incoming.arrived = group.stop

    async def _join(self, client: Client, version: tuple[int, int]) -> _Pair:
        """Connects a pair with the trainer. Raises Refused, before anything is connected, when the version is gone."""
        await client.call(CONFIRM, version, CALL_DEADLINE)
        meeting = await client.call(JOIN, (self.plan.digest, self.hello.instance), CALL_DEADLINE)
        if type(meeting) is not str:
            raise WireError(f"the trainer answers no meeting: {meeting!r:.100}")
        thread = OwnerThread("weights from the trainer")
        with ExitStack() as undo:
            undo.callback(thread.close)
            connecting = thread.submit(lambda: self.backend.connect(meeting, RECEIVER, CONNECT_SECONDS))
            self._pair = _Pair(thread, await asyncio.wrap_future(connecting))
            undo.pop_all()
        return self._pair

    def _end_pair(self) -> None:
        """Aborts what is under way, and lets the thread free the communicator and end."""
        if self._pair is not None:
            thread, communicator = self._pair
            self._pair = None
            communicator.abort()
            thread.submit(communicator.close)
            thread.close()

    async def _leave(self, client: Client) -> None:
        """Tells the trainer that the pair is of no use, as far as it can still be told."""
        with suppress(*_FAILED):
            await client.call(LEAVE, (self.hello.instance,), CALL_DEADLINE)

    async def _control(self, address: str) -> Client:
        if self._client is None or self._client.lost.is_set():
            client = Client(
                self.wire.connect(address), self.hello, f"weights at {address}", queued=False, heartbeat=self.heartbeat
            )
            with ExitStack() as undo:
                undo.callback(client.close)
                await client.open(self.tasks, CALL_DEADLINE)
                undo.pop_all()
            self._client = client
        return self._client

    def _arrived_bytes(self, version: _Version) -> int:
        return self.plan.parts[version.arrived - 1].stop if version.arrived else 0
