"""What reads bytes that somebody else wrote, each as a function of one input; no test library is needed here.

A target takes any bytes, and raises for what is a defect: any error but the one that its reader promises, a caller that
does not get its answer any more, a wait without end. seeds: inputs to start from, that a reader takes.
"""

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import numpy as np

from asyncrl.children.child_messages import packed
from asyncrl.controller.journal import ledger as records
from asyncrl.controller.journal.checkpoints import MANIFEST, Manifest, plan_resume
from asyncrl.controller.journal.journal import FRAME, Scan, encode
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.errors import AsyncrlError, JournalError, PeerLost, WireError
from asyncrl.lanes.control import message_codec
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import InprocWire, Wakeup
from asyncrl.lanes.data.row_reader import FETCH, serve_rows
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import BatchRef, Cuts, Place, RowRef
from asyncrl.protocols.messages import (
    PROTOCOL,
    Call,
    Cancel,
    Failure,
    Hello,
    Item,
    More,
    Ping,
    PromptGroup,
    Reply,
    Welcome,
)
from asyncrl.rewards.execution.child_pool import Answer, ChildProcess

Frames = list[bytes]
PATIENCE = 10.0
"""Seconds after which an input counts as a hang."""

CALLER = Hello("run1", 0, "controller", 0, "controller-0", PROTOCOL, "0.1")
WORKER = replace(CALLER, service="generation", instance="generation0.0-0-a")
PLACE = Place("shm://rows", 1, 3, ("number",))
ROW = RowRef(1, 0, 0, 0, 2, 3, 0, 1, "stop", (PLACE,), reward=0.5, advantage=None)
GROUP = PromptGroup(1, 0, 0, [{"role": "user", "content": "2+2"}], (0, 1), 5, 0, 1.0, 64, 30.0)
CALLS: Sequence[Any] = (
    Call(0, "echo", (Cuts(0, 1, BatchRef((ROW,)), 3, 1), np.arange(40), GROUP), 1.0),
    Call(1, "items", (), 1.0),
    Call(2, "hang", (), 1.0),
    Call(3, FETCH, ([0], [1], ["number"], ["number"]), 1.0),
    More(1, 2),
    Cancel(2),
    Ping(0),
)
ANSWERS: Sequence[Any] = (
    Item(1, BatchRef((ROW,))),
    Reply(0, {"numbers": np.arange(40)}),
    Failure(1, "LostRows", "gone", "generation", 0, ""),
    Ping(0),
)


class Target(Protocol):
    seeds: list[bytes]

    def __call__(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class Pure:
    """A target that holds nothing."""

    def close(self) -> None:
        """There is nothing to close."""


# ---- messages of several frames as one input -----------------------------------------------------------------


def joined(messages: Sequence[Sequence[Any]]) -> bytes:
    """The input that `split` takes apart into these messages."""
    parts = []
    for frames in messages:
        parts.append(bytes([len(frames)]))
        parts += [struct.pack("<H", len(bytes(frame))) + bytes(frame) for frame in frames]
    return b"".join(parts)


def split(data: bytes) -> list[Frames]:
    """Any bytes as messages: for each the number of frames, and for each of those its length and bytes."""
    messages = []
    at = 0
    while at < len(data):
        frames = []
        count = data[at] % 8
        at += 1
        for _ in range(count):
            length = int.from_bytes(data[at : at + 2], "little")
            frames.append(data[at + 2 : at + 2 + length])
            at += 2 + length
        messages.append(frames)
    return messages


def numbered(messages: Sequence[Frames], first: int) -> list[Frames]:
    """As the sender of a link numbers them, so that an input gets past the numbers."""
    return [
        [struct.pack("<Q", first + index) + b"".join(bytes(frame) for frame in frames[:1]), *frames[1:]]
        for index, frames in enumerate(messages)
    ]


def frames_of(message: Any) -> Frames:
    return [bytes(frame) for frame in message_codec.encode(message)]


# ---- the codec -----------------------------------------------------------------------------------------------


class Codec(Pure):
    seeds: ClassVar = [joined([frames_of(message)]) for message in (*CALLS, *ANSWERS, CALLER)]

    def __call__(self, data: bytes) -> None:
        for frames in split(data):
            try:
                value = message_codec.decode(frames)
            except WireError:
                continue
            message_codec.encode(value)


# ---- both ends of a link -------------------------------------------------------------------------------------


class Looping:
    """A target that lives on an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note)
        self._noted: list[dict[str, Any]] = []

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._noted.append(context)

    def __call__(self, data: bytes) -> None:
        self._loop.run_until_complete(asyncio.wait_for(self.once(data), PATIENCE))
        assert not self._noted, self._noted

    async def once(self, data: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._loop.close()


class Worker(Looping):
    """The listening end: strangers, and callers that were greeted, beside one whose calls are to be answered.

    The first byte says whether a hello goes before the messages, and whether they are numbered as they should be.
    """

    seeds: ClassVar = [bytes([kind]) + joined([frames_of(message) for message in CALLS]) for kind in range(4)]

    def __init__(self) -> None:
        super().__init__()
        self._wire = InprocWire()
        self._asked = 0
        rows = RowStore.private("inproc://worker", 4, 64)
        rows.put({"number": np.arange(4)})
        self._fetch = serve_rows(rows)
        self._host = Server(self._wire.listen("inproc://worker"), self._dispatch, WORKER, credit=8)
        self._serving = self._loop.create_task(self._host.serve())
        self._honest = self._loop.run_until_complete(self._greeted())

    def close(self) -> None:
        self._serving.cancel()
        self._loop.run_until_complete(self._honest.__aexit__())
        self._loop.run_until_complete(asyncio.wait([self._serving]))
        super().close()

    async def _greeted(self) -> Client:
        return await Client(self._wire.connect("inproc://worker"), CALLER, "worker").__aenter__()

    def _dispatch(self, call: Call) -> Any:
        return {"items": self._items, "hang": self._hang, FETCH: self._fetch}.get(call.method, self._echo)(call)

    async def _echo(self, call: Call) -> Any:
        return call.args

    async def _items(self, call: Call) -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async def _hang(self, call: Call) -> None:
        await asyncio.Event().wait()

    async def once(self, data: bytes) -> None:
        kind = data[0] if data else 0
        messages = split(data[1:])
        stranger = self._wire.connect("inproc://worker")
        if kind & 1:
            stranger.offer([struct.pack("<Q", 0), *frames_of(CALLER)])
        for frames in numbered(messages, kind & 1) if kind & 2 else messages:
            stranger.offer(frames)
        for _ in range(6):
            await asyncio.sleep(0)
        stranger.close()
        self._asked += 1
        if self._asked % 16 == 0:
            assert await self._honest.call("echo", (self._asked,), PATIENCE) == (self._asked,)
        assert not self._serving.done(), self._serving


class Deaf:
    """The wire of a caller: what it sends is gone; what it receives was prepared. Then the peer is lost."""

    address = "prepared"

    def __init__(self, messages: Sequence[Frames]) -> None:
        self._messages = list(reversed(messages))
        self.room = Wakeup()

    def offer(self, frames: Any) -> bool:
        return True

    async def pump(self, handle: Any) -> None:
        while True:
            for _ in range(4):
                await asyncio.sleep(0)
            if not self._messages:
                raise PeerLost("no more")
            handle(self._messages.pop())

    def close(self) -> None:
        """There is nothing to close."""


class Controller(Looping):
    """The calling end: whatever the worker says, each call ends, with an answer or an error that is ours.

    The first byte says whether the worker welcomes the caller first, and whether its messages are numbered.
    """

    seeds: ClassVar = [bytes([kind]) + joined([frames_of(message) for message in ANSWERS]) for kind in range(4)]

    async def once(self, data: bytes) -> None:
        kind = data[0] if data else 0
        messages = split(data[1:])
        welcome = [[struct.pack("<Q", 0), *frames_of(Welcome("generation0.0-0-a", 8))]] if kind & 1 else []
        told = numbered(messages, len(welcome)) if kind & 2 else messages
        try:
            async with Client(Deaf([*welcome, *told]), CALLER, "worker") as link, asyncio.TaskGroup() as tasks:
                tasks.create_task(_ended(link.call("echo", (), PATIENCE / 2)))
                tasks.create_task(_ended(_consumed(link)))
        except AsyncrlError:
            return


async def _ended(call: Any) -> None:
    try:
        await call
    except AsyncrlError:
        return


async def _consumed(link: Client) -> None:
    async with aclosing(link.stream("items", (), PATIENCE / 2)) as items:
        async for _ in items:
            await asyncio.sleep(0)


# ---- reward children -----------------------------------------------------------------------------------------


class RewardFrames(Looping):
    """What a reward child says: the call that waits for it ends, with results or with the end of the child."""

    seeds: ClassVar = [
        packed({"call": 0, "results": [[1.0, "", "", [], 0], [{"a": 0.5}, "", "", [], 0]]}),
        packed({"call": 0, "results": [[None, "raised", "trace", [], 2]]}) + packed({"call": 7, "results": []}),
    ]

    async def once(self, data: bytes) -> None:
        stdout = asyncio.StreamReader()
        stdout.feed_data(data)
        stdout.feed_eof()
        process: Any = SimpleNamespace(stdout=stdout, stdin=_Pipe(), wait=_status, pid=1)
        child = ChildProcess(process)
        answer = child._answers[0] = Answer(2)
        await child._read()
        try:
            await answer.whole(PATIENCE)
        except AsyncrlError:
            return


class _Pipe:
    """The end of a pipe that a child would read."""

    transport = SimpleNamespace(abort=lambda: None)

    def is_closing(self) -> bool:
        return False


async def _status() -> int:
    return 1


# ---- what is read back from disk -----------------------------------------------------------------------------


RECORDS: Sequence[records.Record] = (
    records.Drawn(0, 0, 2),
    records.AttemptStarted(0, 1, (1,), "lost"),
    records.Generated(0, 0, ((0, 0, 0, 5),)),
    records.Scored(0, 0, 1.0),
    records.Dropped(0, (1,), "poison"),
    records.InFlight(((0, (0,)),)),
    records.Resumed(1, 0, 0),
)


def framed(payloads: Sequence[bytes]) -> bytes:
    """A journal of these records, with true checksums."""
    return b"".join(FRAME.pack(len(payload), zlib.crc32(payload)) + payload for payload in payloads)


def journal_of(data: bytes) -> MemoryStore:
    store = MemoryStore()
    store.append(data)
    return store


class JournalBytes(Pure):
    """The bytes of a journal."""

    seeds: ClassVar = [b"".join(encode(record) for record in RECORDS[:count]) for count in range(1, len(RECORDS) + 1)]

    def __call__(self, data: bytes) -> None:
        _read_back(journal_of(data))


class JournalRecords(Pure):
    """Records with true checksums, whatever they say."""

    seeds: ClassVar = [joined([[encode(record)[FRAME.size :] for record in RECORDS]])]

    def __call__(self, data: bytes) -> None:
        _read_back(journal_of(framed([payload for frames in split(data) for payload in frames])))


def _replay(store: MemoryStore) -> None:
    Scan(store).replay()


def _read_back(store: MemoryStore) -> None:
    for read in (_replay, plan_resume):
        try:
            read(store)
        except JournalError:
            continue


class ManifestBytes(Pure):
    """The description of a checkpoint: its journal is whole, and none of its files is missing."""

    def __init__(self) -> None:
        journal = b"".join(encode(record) for record in RECORDS[:2])
        chain = Scan(journal_of(journal)).replay().chain.hex()
        self._journal = journal
        good = Manifest(0, 0, len(journal), zlib.crc32(journal), chain, {"model/weights": "ab"})
        self.seeds = [good.encode(), replace(good, files={}).encode()]

    def __call__(self, data: bytes) -> None:
        store = journal_of(self._journal)
        store.create("0")
        store.put("0", MANIFEST, data)
        try:
            plan_resume(store)
        except JournalError:
            return


TARGETS: dict[str, Callable[[], Target]] = {
    "codec": Codec,
    "worker": Worker,
    "controller": Controller,
    "reward": RewardFrames,
    "journal": JournalBytes,
    "records": JournalRecords,
    "manifest": ManifestBytes,
}
