"""Versions of the weights over pairs of ranks, from the trainer to each engine.

groups                what both sides share: groups of parts
CollectiveSender      the trainer's side: sends each version from a block of its own
CollectiveReceiver    the engine's side: receives into its idle block
"""

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from asyncrl.errors import PeerLost, Refused, WireError
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.weights.leases import CopiedVersions, Leases, slot_of
from asyncrl.lanes.weights.slot_memory import checked, digest, digested_tensor, fill, new_block, views
from asyncrl.lanes.weights.transports.communicator import (
    CONNECT_SECONDS,
    GROUP_PARTS,
    RECEIVER,
    TRAINER,
    Backend,
    Communicator,
    OwnerThread,
)
from asyncrl.lanes.weights.transports.version_transfer import (
    FAILED,
    CallTypes,
    ChunkPlan,
    LaneEnd,
    SlotPart,
    VersionReceiver,
    is_of,
    transfer_seconds,
)
from asyncrl.protocols.messages import Published
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


# Calls of a receiver over the encrypted control wire: who meets where, what is to be sent, and whether it was whole.
#
# join_pair ── send_version ── (the pair moves the bytes) ── confirm_version ... leave_pair


JOIN = "join_pair"
SEND = "send_version"
CONFIRM = "confirm_version"
LEAVE = "leave_pair"

_ARGUMENTS: CallTypes = {
    JOIN: [(str, str)],
    SEND: [(int, int, int, str)],
    CONFIRM: [(int, int)],
    LEAVE: [(str,)],
}


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
    """Implements WeightSender: versions in blocks of their own, a pair with its thread for each reader. scheme: stands
    before the address of the trainer's control wire.

    Invariant: a version is marked as overwritten before its block is, so that no reader of it is confirmed afterwards.
    The trainer's compute thread calls `write`; the calls of readers and the ends of transfers run on the event loop.
    """

    def __init__(self, plan: ChunkPlan, scheme: str, backend: Backend, end: LaneEnd) -> None:
        self.leases: Leases = CopiedVersions()
        self._plan = plan
        self._backend = backend
        self._end = end
        end.serve(self, _ARGUMENTS)
        self.address = scheme + end.address
        self._blocks: list[Tensor] = []
        self._stored: list[SentVersion] = []  # oldest first; replaced, never changed
        self._pairs: dict[str, PairThread] = {}

    def write(self, incarnation: int, version: int, named_tensors: Mapping[str, Tensor]) -> Published:
        """Implements WeightSender. Raises what torch raises when the device has too little memory for a block."""
        spec = self._plan.spec
        tensors = checked(named_tensors, spec)
        block = self._free_block()
        fill(views(block, spec), tensors)
        digest_of = digested_tensor(spec, version)
        found = digest(block, spec, digest_of)
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
        self._end.close()

    async def join_pair(self, plan: str, reader: str) -> str:
        """Begins a new pair with the reader in place of its former one, and returns where both meet. Raises Refused
        when the reader plans other parts."""
        self._plan.refuse_other(plan, reader)
        self.forget(reader)
        meeting = self._backend.invite()
        thread = OwnerThread(f"weights to {reader}")
        connected = thread.submit(lambda: self._backend.connect(meeting, TRAINER, CONNECT_SECONDS))
        self._pairs[reader] = PairThread(reader, thread, connected)
        return meeting

    async def send_version(self, incarnation: int, version: int, first: int, reader: str) -> None:
        """Begins to send the parts of a version from number `first` on. Raises Refused when the version is not here,
        PeerLost when the reader has no pair."""
        held = self._find(incarnation, version)
        pair = self._pairs.get(reader)
        if pair is None or pair.failed:
            raise PeerLost(f"{reader} has no pair with the trainer any more")
        held.readers.add(reader)
        sending = pair.thread.submit(lambda: self._send(pair, held, first))
        loop = asyncio.get_running_loop()
        sending.add_done_callback(lambda done: loop.call_soon_threadsafe(self._sent, pair, held, done))

    async def confirm_version(self, incarnation: int, version: int) -> None:
        """Raises Refused when the version was overwritten, maybe while it was sent."""
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


@dataclass(eq=False)
class ArrivingVersion:
    """A version in a block. parts: of it. arrived: those that are there, in order from the first."""

    incarnation: int
    version: int
    block: Tensor
    parts: int
    arrived: int = 0

    @property
    def missing(self) -> range:
        return range(self.arrived, self.parts)

    @property
    def whole(self) -> bool:
        return self.arrived == self.parts


class _Pair(NamedTuple):
    thread: OwnerThread
    communicator: Communicator


class CollectiveReceiver(VersionReceiver[ArrivingVersion]):
    """Implements WeightReceiver. scheme: what stands before the address of the trainer's control wire."""

    reopens = False  # What a backend has open ends with its process.

    def __init__(self, plan: ChunkPlan, scheme: str, backend: Backend, end: LaneEnd) -> None:
        super().__init__(plan)
        self.backend = backend
        self.end = end
        self._scheme = scheme
        self._idle: list[Tensor] = []
        self._pair: _Pair | None = None

    def close(self) -> None:
        self._end_pair()
        self.end.close()

    def _use(self, version: ArrivingVersion) -> None:
        if self._current is not None:
            self._idle.append(self._current.block)
        self._current = version

    def _begin(self, published: Published) -> ArrivingVersion:
        if self._incoming is not None and is_of(published, self._incoming):
            return self._incoming
        self._give_up()
        block = self._idle.pop() if self._idle else new_block(self.plan.spec, self.backend.device)
        self._incoming = ArrivingVersion(published.incarnation, published.version, block, len(self.plan.parts))
        return self._incoming

    def _give_up(self) -> None:
        """Forgets the version that arrives; no transfer writes to its block."""
        if self._incoming is not None:
            self._idle.append(self._incoming.block)
            self._incoming = None

    async def _bring(self, incoming: ArrivingVersion, sender: str) -> None:
        control = sender.removeprefix(self._scheme)
        try:
            await self._receive(incoming, control)
        except FAILED:
            await self._receive(incoming, control)  # What is missing, over another pair.

    async def _receive(self, incoming: ArrivingVersion, control: str) -> None:
        """Receives the missing parts. Ends the pair when that fails, but for a version that the trainer refuses."""
        version = (incoming.incarnation, incoming.version)
        client = await self.end.client(control, CALL_DEADLINE)
        if not incoming.whole:
            pair = self._pair or await self._join(client, version)
            with ExitStack() as failing:
                failing.callback(self._end_pair)
                try:
                    await client.call(SEND, (*version, incoming.arrived, self.end.hello.instance), CALL_DEADLINE)
                    await self._receive_parts(pair, incoming)
                except FAILED:
                    await self._leave(client)
                    raise
                failing.pop_all()
        try:
            await client.call(CONFIRM, version, CALL_DEADLINE)
        except Refused:
            incoming.arrived = 0  # Its parts may be of two versions.
            raise

    async def _receive_parts(self, pair: _Pair, incoming: ArrivingVersion) -> None:
        """Receives on the thread of the pair. Who is cancelled leaves the block to the transfer."""
        receiving = pair.thread.submit(lambda: self._fill(pair.communicator, incoming))
        try:
            await asyncio.wrap_future(receiving)
        finally:
            if not receiving.done():
                self._incoming = None

    def _fill(self, communicator: Communicator, incoming: ArrivingVersion) -> None:
        for group in groups(self.plan, incoming.arrived):
            communicator.receive([incoming.block[part.start : part.stop] for part in group.parts], group.seconds)
            self.received_bytes += group.parts[-1].stop - group.parts[0].start
            incoming.arrived = group.stop

    async def _join(self, client: Client, version: tuple[int, int]) -> _Pair:
        """Connects a pair with the trainer. Raises Refused, before anything is connected, when the version is gone."""
        await client.call(CONFIRM, version, CALL_DEADLINE)
        meeting = await client.call(JOIN, (self.plan.digest, self.end.hello.instance), CALL_DEADLINE)
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
        with suppress(*FAILED):
            await client.call(LEAVE, (self.end.hello.instance,), CALL_DEADLINE)
