"""Targets whose bytes come from another host: at the join point, in copied files and rows, and at a TCP port."""

import asyncio
import shutil
import socket
import tempfile
import zlib
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np

from asyncrl.concurrency import running_beside
from asyncrl.controller.journal.run_copy import CopiedFile, Head, brought
from asyncrl.errors import ConfigError, JournalError, Refused, WeightsError, WireError
from asyncrl.fleet.launching.join_point import JoinPoint, Places
from asyncrl.lanes.control import message_codec
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.data.file_cache import FileCache, FileServer, OfferedFiles
from asyncrl.lanes.data.row_file import RowFileWriter, store_again
from asyncrl.protocols.batch import Batch, BatchRef, Column, Place
from asyncrl.protocols.messages import Call, FilePart, FileTree, JoinRequest, ListedFile
from tests.fuzz.targets import CALLER, PATIENCE, ROW, WORKER, Looping, Worker, frames_of, joined, split
from tests.memory_objects import MemoryObjects

JOIN = JoinRequest("generation", "agent", "m", "m", "h1", {"asyncrl": "0.1"}, "proof", ["cuda:0"])
JOIN_CALLS = (
    Call(0, "join", (JOIN,), 10.0),
    Call(1, "state", (JOIN,), 1.0),
    Call(2, "probe", (JOIN,), 1.0),
    Call(3, "trees", ("agent",), 1.0),
    Call(4, "part", ("agent", sha256(b"seen").hexdigest(), 0), 1.0),
    Call(5, "ready", ("agent",), 1.0),
    Call(6, "started", ("agent", "tcp://a:1", "tcp://a:2", "tcp://a:3", {"pid": 1}), 1.0),
    Call(7, "ended", ("agent", "generation0.0-0-a", "killed"), 1.0),
    Call(8, "leaving", ("agent", 1.0), 1.0),
    Call(9, "upload", ("ticket", b"data"), 1.0),
    Call(10, "echo", (1,), 1.0),
)


class Joining(Worker):
    """The join point of a controller, where hosts of any key offer workers, read files and probe."""

    seeds: ClassVar = [bytes([kind]) + joined([frames_of(call) for call in JOIN_CALLS]) for kind in range(4)]

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="asyncrl-fuzz-"))
        (self._folder / "seen").write_bytes(b"seen")
        places = {"generation": Places(1, ("asyncrl",), "asyncrl join generation")}
        self._point = JoinPoint(
            "inproc://worker",
            places,
            lambda proof: "generation" if proof == "proof" else "",
            deadline=10.0,
            report=lambda text: None,
            versions={"asyncrl": "0.1"},
            files=FileServer({"generation": [OfferedFiles(self._folder, "folder")]}),
        )
        super().__init__()

    def _dispatch(self, call: Call) -> Any:
        return self._echo(call) if call.method == "echo" else self._point.dispatch(call)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder)


class CopiedFiles(Looping):
    """The list and the parts of files that a controller sends: nothing is written outside of the cache."""

    def __init__(self) -> None:
        super().__init__()
        content = b"x" * 40
        self._around = Path(tempfile.mkdtemp(prefix="asyncrl-fuzz-"))
        file = ListedFile("model/weights", len(content), sha256(content).hexdigest())
        tree = FileTree(str(self._around / "elsewhere"), "folder", (file,))
        part = FilePart(content, zlib.crc32(content))
        self.seeds = [joined([frames_of(tree), frames_of(part)])]

    async def once(self, data: bytes) -> None:
        found = []
        for frames in split(data):
            with suppress(WireError):
                found.append(message_codec.decode(frames))
        trees = [each for each in found if isinstance(each, FileTree) and sum(f.size for f in each.files) < 1 << 20]
        parts = [each for each in found if isinstance(each, FilePart)]

        async def fetch(digest: str, offset: int) -> FilePart:
            if not parts:
                raise Refused("there are no parts")
            return parts.pop(0)

        with suppress(ConfigError, WireError, Refused):
            await FileCache(self._around / "cache", lambda text: None).bring(trees, fetch)
        assert {path.name for path in self._around.iterdir()} <= {"cache"}
        shutil.rmtree(self._around / "cache", ignore_errors=True)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._around)


class RowFiles(Looping):
    """A file of rows, which a host copies from a controller."""

    def __init__(self) -> None:
        super().__init__()
        file = BytesIO()
        self._loop.run_until_complete(RowFileWriter(file, _OneRow()).save(BatchRef((ROW, ROW))))
        self.seeds = [file.getvalue()]
        assert self.seeds[0]

    async def once(self, data: bytes) -> None:
        try:
            await store_again(BytesIO(data), BatchRef((ROW,)), 1, lambda name, columns: Place("shm://new", 0, 1, ()))
        except WireError:
            return


class _OneRow:
    """Reads the same row each time."""

    async def read(self, refs: BatchRef, columns: list[str], /) -> Batch:
        return Batch({name: Column.of([np.arange(4) for _ in refs]) for name in columns})


class WeightChunks(Looping):
    """A chunk of weights from the trainer or another receiver. It needs torch."""

    def __init__(self) -> None:
        super().__init__()
        from asyncrl.lanes.weights.chunk_codec import WireCodec, encode_chunk
        from asyncrl.lanes.weights.transports.weight_stream import packed

        base = np.arange(1024, dtype=np.float32).view(np.uint8)
        new = base.copy()
        new[:40] = 7
        chunks = [encode_chunk(codec, new, "float32", base) for codec in WireCodec]
        self.seeds = [joined([frames_of(packed(chunk))]) for chunk in chunks if len(chunk.data) < 60_000]
        self._base = base

    async def once(self, data: bytes) -> None:
        from asyncrl.lanes.weights.chunk_codec import decode_chunk
        from asyncrl.lanes.weights.transports.weight_stream import unpacked

        for frames in split(data):
            for base in (self._base, None):
                try:
                    chunk = unpacked(message_codec.decode(frames))
                    decode_chunk(chunk, "float32", np.empty_like(self._base), base)
                except (WireError, Refused, WeightsError):
                    continue


class Port(Looping):
    """Bytes to a TCP port, where greeting and handshake come first: some connections are cut off, others stay half
    open, and the holder of a key is answered meanwhile."""

    OPEN = 32
    """Connections that stay open; the oldest is closed then."""

    seeds: ClassVar = [
        b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32),
        b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\4\xc8\x05HELLO" + bytes(194),
        b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32) + b"\4\x26\x05READY" + bytes(32),
        b"GET / HTTP/1.1\r\n\r\n",
    ]

    def __init__(self) -> None:
        super().__init__()
        self._asked, self._open = 0, list[socket.socket]()
        self._stop = asyncio.Event()
        ready = self._loop.create_future()
        self._serving = self._loop.create_task(self._serve(ready))
        self._link, self._port = self._loop.run_until_complete(ready)

    async def _serve(self, ready: "asyncio.Future[tuple[Client, int]]") -> None:
        async def echo(call: Call) -> Any:
            return call.args[0]

        wire = ZmqWire(CurveKeys.fresh())
        listener = wire.listen("tcp://127.0.0.1:*")
        server = Server(listener, echo, WORKER)
        try:
            async with (
                running_beside({"server": server.serve()}),
                Client(wire.connect(listener.address), CALLER, "worker") as link,
            ):
                ready.set_result((link, int(listener.address.rpartition(":")[2])))
                await self._stop.wait()
        finally:
            wire.close()

    async def once(self, data: bytes) -> None:
        stranger = socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE)
        with suppress(OSError):
            stranger.sendall(data[1:])
        if data[:1] < b"\x80":
            stranger.close()
        else:
            self._open.append(stranger)
        if len(self._open) > self.OPEN:
            self._open.pop(0).close()
        self._asked += 1
        if self._asked % 16 == 0:
            assert await self._link.call("echo", (self._asked,), PATIENCE) == self._asked

    def close(self) -> None:
        for each in self._open:
            each.close()
        self._stop.set()
        self._loop.run_until_complete(asyncio.wait([self._serving]))
        super().close()


class CopyHeads:
    """The head of a copy in a store of objects, which others may write."""

    def __init__(self) -> None:
        self._objects = MemoryObjects(
            objects={f"objects/{sha256(part).hexdigest()}": part for part in (b"one", b"two")}
        )
        parts = tuple(sorted(name.removeprefix("objects/") for name in self._objects.objects))
        head = Head(
            3, "writer", {"journal": CopiedFile(6, parts), "checkpoints/3/trainer.pt": CopiedFile(3, parts[:1])}
        )
        self.seeds = [head.encode(), replace(head, files={}).encode()]

    def __call__(self, data: bytes) -> None:
        self._objects.head = data
        with TemporaryDirectory() as folder, suppress(JournalError, OSError):
            brought(self._objects, Path(folder) / "inside" / "run")
            assert [path.name for path in Path(folder).iterdir()] == ["inside"], "it writes nowhere else"

    def close(self) -> None:
        """There is nothing to close."""


HOSTS = {
    "joining": Joining,
    "files": CopiedFiles,
    "row-file": RowFiles,
    "head": CopyHeads,
    "weights": WeightChunks,
    "port": Port,
}
