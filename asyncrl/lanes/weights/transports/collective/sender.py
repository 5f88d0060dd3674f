"""The trainer's side: versions in blocks of their own, sent to each receiver by the thread of its pair.

The trainer waits for no receiver. When it needs the block of a version that is being sent, the version is marked as
overwritten first: its senders stop, and a receiver that has all bytes by then is refused when it asks for the
confirmation, so that it uses no version in which two are mixed.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from asyncrl.errors import PeerLost, Refused
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.weights.leases import Leases, slot_of
from asyncrl.lanes.weights.slot_block import block_digest, block_views, new_block
from asyncrl.lanes.weights.slot_memory import checked, digested_tensor, fill
from asyncrl.lanes.weights.transports.chunk_plan import ChunkPlan
from asyncrl.lanes.weights.transports.collective.communicator import (
    CONNECT_SECONDS,
    TRAINER,
    Backend,
    Communicator,
)
from asyncrl.lanes.weights.transports.collective.link_server import LinkServer
from asyncrl.lanes.weights.transports.collective.owner_thread import OwnerThread
from asyncrl.lanes.weights.transports.collective.part_groups import groups
from asyncrl.lanes.weights.transports.copied_versions import BUFFERS, CopiedVersions
from asyncrl.protocols.messages import Hello, Published


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
    """Implements WeightSender, and PairCalls. `write` runs on one thread, everything else on the event loop."""

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
        slot, seconds = slot_of(version), self._plan.from_one
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
