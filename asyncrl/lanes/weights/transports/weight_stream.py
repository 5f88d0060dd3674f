"""Versions of the weights over a network, pulled part by part.

WeightServer      answers receivers: at the trainer, and at every receiver for those below it
StreamSender      the trainer's side: writes versions into buffers that are served
StreamReceiver    the engine's side: pulls a version while the one before serves
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from asyncrl.concurrency import gather
from asyncrl.errors import DeadlineExceeded, Refused, WeightsError
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.weights.chunk_codec import LOSSY, EncodedChunk, WireCodec, decode_chunk
from asyncrl.lanes.weights.leases import CopiedVersions, Leases, slot_of
from asyncrl.lanes.weights.plan.routes_of_parts import CHILDREN, parent
from asyncrl.lanes.weights.slot_memory import checked, digest, digested_tensor, fill, views
from asyncrl.lanes.weights.transports.version_transfer import (
    FAILED,
    Bytes,
    CallTypes,
    ChunkPlan,
    HeldVersion,
    LaneEnd,
    VersionReceiver,
    in_thread,
    is_of,
    new_memory,
)
from asyncrl.protocols.messages import Published
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
    """Answers receivers at one end. held: versions that can be pulled, by number; the owner replaces the mapping, on
    any thread."""

    def __init__(self, end: LaneEnd) -> None:
        self.held: dict[int, HeldVersion] = {}
        end.serve(self, _ARGUMENTS)

    async def open_weights(self, incarnation: int, version: int, plan: str, reader: str, address: str) -> str:
        """Returns the address of the parent from which the reader pulls, "" for this one."""
        held = self._find(incarnation, version)
        held.plan.refuse_other(plan, reader)
        held.note_sign(reader)
        held.receivers.setdefault(reader, address)
        order = list(held.receivers)
        above = parent(order.index(reader), CHILDREN)
        return "" if above is None else held.receivers[order[above]]

    async def weights_chunk(self, incarnation: int, version: int, number: int, base: int | None, reader: str) -> Packed:
        held = self._find(incarnation, version)
        if not 0 <= number < len(held.plan.parts):
            raise Refused(f"there is no part {number} of the weights; there are {len(held.plan.parts)}")
        held.note_sign(reader)
        return packed(await held.chunk(number, base))

    async def close_weights(self, incarnation: int, version: int, reader: str) -> None:
        """Notes that a reader has the version, or gives it up."""
        if (held := self.held.get(version)) is not None and held.incarnation == incarnation:
            held.pulled_at.pop(reader, None)

    def _find(self, incarnation: int, version: int) -> HeldVersion:
        held = self.held.get(version)
        if held is None or held.incarnation != incarnation:
            have = ", ".join(str(number) for number in sorted(self.held)) or "none"
            raise Refused(f"weights of version {version} of incarnation {incarnation} are not here; versions: {have}")
        return held


_ARGUMENTS: CallTypes = {
    OPEN: [(int, int, str, str, str)],
    CHUNK: [(int, int, int, int, str), (int, int, int, type(None), str)],
    DONE: [(int, int, str)],
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

    def __init__(self, plan: ChunkPlan, end: LaneEnd) -> None:
        self.leases: Leases = CopiedVersions()
        self.server = WeightServer(end)
        self._end = end
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._buffers = 0
        self._stored: list[HeldVersion] = []  # oldest first

    def write(self, incarnation: int, version: int, named_tensors: Mapping[str, Tensor]) -> Published:
        """Implements WeightSender. Raises MemoryError when there is too little for a buffer."""
        spec = self._plan.spec
        tensors = checked(named_tensors, spec)
        before = self._stored[-1] if self._stored else None
        held = HeldVersion(self._plan, incarnation, version, self._free_buffer())
        fill(views(held.block, spec), tensors)
        if before is not None and before.version < version:
            held.base = before
            held.base_version = before.version
        self._stored.append(held)
        self.server.held = {each.version: each for each in self._stored}
        digest_of = digested_tensor(spec, version)
        exact = "" if self._plan.codec in LOSSY else digest(held.block, spec, digest_of)
        seconds = StreamReceiver.senders * self._plan.from_one
        return Published(incarnation, version, self._end.address, slot_of(version), exact, digest_of, transfer=seconds)

    def forget(self, reader: str) -> None:
        for held in self._stored:
            held.pulled_at.pop(reader, None)
            if reader in held.receivers:
                held.receivers[reader] = ""  # Its place stays, so that others keep theirs; the trainer stands in.

    def close(self) -> None:
        self._end.close()

    def _free_buffer(self) -> Bytes:
        if self._buffers < BUFFERS:
            self._buffers += 1
            return new_memory(self._plan.spec)
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


class StreamReceiver(VersionReceiver[HeldVersion]):
    """Implements WeightReceiver over a wire. Receivers below this one pull from its end."""

    senders = 2  # Another receiver, then the trainer.

    def __init__(self, plan: ChunkPlan, end: LaneEnd) -> None:
        super().__init__(plan)
        self.end = end
        self.server = WeightServer(end)
        self._slots: list[Bytes] = []

    def close(self) -> None:
        self.end.close()

    def _give_up(self) -> None:
        if self._incoming is not None:
            self._incoming.overwrite()
            self._incoming = None

    def _begin(self, published: Published) -> HeldVersion:
        if self._incoming is not None and is_of(published, self._incoming):
            self._incoming.arriving = True
            return self._incoming
        self._give_up()
        while len(self._slots) < SLOTS:
            self._slots.append(new_memory(self.plan.spec))
        base = self._current
        idle = next(each for each in self._slots if base is None or each is not base.memory)
        for held in self.server.held.values():
            if held.memory is idle and not held.overwritten:
                held.overwrite()
        number = None if base is None else base.version
        incoming = HeldVersion(
            self.plan, published.incarnation, published.version, idle, not self.plan.parts, number, base
        )
        self._incoming = incoming
        self.server.held = {each.version: each for each in (base, incoming) if each is not None}
        return incoming

    async def _bring(self, incoming: HeldVersion, sender: str) -> None:
        try:
            await self._pull(incoming, sender)
        finally:
            if not incoming.whole:
                incoming.stop_arriving()

    async def _pull(self, incoming: HeldVersion, root: str) -> None:
        """Pulls the missing parts from the parent, and from the trainer what the parent does not give in its time."""
        version = (incoming.incarnation, incoming.version)
        me = self.end.hello.instance
        opening = (*version, self.plan.digest, me, self.end.address)
        above = await (await self.end.client(root, HELLO_DEADLINE)).call(OPEN, opening, HELLO_DEADLINE)
        if above:
            with suppress(*FAILED, TimeoutError, Refused, WeightsError):
                async with asyncio.timeout(self.plan.from_one):
                    await self._pull_from(above, incoming)
        async with asyncio.timeout(self.plan.from_one):
            try:
                await self._pull_from(root, incoming)
            except FAILED:
                await self._pull_from(root, incoming)  # What is missing, on another connection.
        with suppress(*FAILED):
            await (await self.end.client(root, HELLO_DEADLINE)).call(DONE, (*version, me), HELLO_DEADLINE)

    async def _pull_from(self, source: str, incoming: HeldVersion) -> None:
        client = await self.end.client(source, HELLO_DEADLINE)
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
            asked = (incoming.incarnation, incoming.version, number, base and base.version, self.end.hello.instance)
            chunk = unpacked(await client.call(CHUNK, asked, self.plan.parts[number].deadline))
            before = None if base is None else base.bytes_of(number)
            decode = partial(decode_chunk, chunk, self.plan.spec.dtype, incoming.bytes_of(number), before)
            try:
                await in_thread(chunk.size, decode, dense=chunk.kind is WireCodec.DENSE)
            except WeightsError:
                if not left:
                    raise
                base = None
                continue
            self.received_bytes += len(chunk.data)
            self.largest_error = max(self.largest_error, chunk.error)
            return incoming.add(number, chunk)
