"""The engine's side: receives a version into its idle block, while the version before serves.

    fetch ── join, once ── send version from part n on ── groups of parts on the pair's thread ── confirm ── digest

Parts that have arrived stay when the pair breaks, and the rest comes over another pair. A block that a transfer may
still write to, because whoever waited gave up, is left to that transfer and not used again.
"""

import asyncio
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from torch import Tensor

from asyncrl.errors import DeadlineExceeded, PeerLost, Refused, WeightsError, WireError
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.weights.receiver_report import Fetched
from asyncrl.lanes.weights.slot_block import block_views, check_block_digest, new_block
from asyncrl.lanes.weights.slot_memory import with_aliases
from asyncrl.lanes.weights.transports.chunk_plan import ChunkPlan
from asyncrl.lanes.weights.transports.collective.communicator import (
    CONNECT_SECONDS,
    RECEIVER,
    Backend,
    Communicator,
)
from asyncrl.lanes.weights.transports.collective.link_server import CONFIRM, JOIN, LEAVE, SEND
from asyncrl.lanes.weights.transports.collective.owner_thread import OwnerThread
from asyncrl.lanes.weights.transports.collective.part_groups import groups
from asyncrl.lanes.weights.transports.held_version import in_thread
from asyncrl.protocols.messages import Hello, Published

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
