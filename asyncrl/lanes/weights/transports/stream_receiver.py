"""The engine's side of a network: pulls a version part by part, while the version before serves.

    fetch ── open at the trainer ── parts from the parent, several on their way ── memory of the idle slot
                                    └─ from the trainer where the parent fails

Parts that have arrived stay when a connection breaks. A part that comes damaged, or does not result in what its sender
has, is asked for again without a base.
"""

import asyncio
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import numpy as np
from torch import Tensor

from asyncrl.concurrency import gather
from asyncrl.errors import DeadlineExceeded, PeerLost, Refused, WeightsError, WireError
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.shared_memory import Segment
from asyncrl.lanes.weights.codec.chunk import EncodedChunk, WireCodec, decode_chunk
from asyncrl.lanes.weights.leases import SLOTS
from asyncrl.lanes.weights.receiver_report import Fetched
from asyncrl.lanes.weights.slot_memory import check_digest, views, with_aliases
from asyncrl.lanes.weights.transports.chunk_plan import ChunkPlan
from asyncrl.lanes.weights.transports.held_version import HeldVersion, in_thread
from asyncrl.lanes.weights.transports.weight_server import CHUNK, DONE, OPEN, WeightServer, unpacked
from asyncrl.protocols.messages import Hello, Published

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
