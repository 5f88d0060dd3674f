"""Measures limits of the machine: memcpy, an asyncio echo, a Unix socket, zmq.asyncio, and raw ZeroMQ sockets.

The remote ends run in processes of their own: `python -m asyncrl.bench.transfer_speed.machine_limits KIND PATH`.
"""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from asyncrl.bench.rivals.timed_rounds import (
    LARGE,
    gigabytes_per_second,
    percentiles,
    rollout,
    seconds_of,
    seconds_of_async,
)
from asyncrl.errors import DeadlineExceeded

ECHOES = 1000
CHUNK = 2**20
START_DEADLINE, START_CHECK = 10.0, 0.001
"""Seconds for a remote end to listen, and between two looks whether it does."""


# ---- remote ends -----------------------------------------------------------------------------------------


class EchoProtocol(asyncio.Protocol):
    """Returns the bytes that it receives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class BareSocket:
    """Moves messages of `frames` frames over a raw ZeroMQ socket on an event loop: a lower bound for a call. It is read
    in the same way as the socket of the control lane."""

    _backend: Any = zmq.backend.Socket
    _no_wait, _events, _input = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)

    def __init__(self, socket: "zmq.Socket[bytes]", frames: int, receive: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._frames = frames
        self._receive = receive
        asyncio.get_running_loop().add_reader(socket.fileno(), self._drain)
        self._drain()

    def _drain(self) -> None:
        while self._backend.get(self._socket, self._events) & self._input:
            self._receive([self._backend.recv(self._socket, self._no_wait) for _ in range(self._frames)])

    def send(self, message: list[bytes]) -> None:
        for frame in message[:-1]:
            self._backend.send(self._socket, frame, self._no_wait | int(zmq.SNDMORE), True)
        self._backend.send(self._socket, message[-1], self._no_wait, True)
        if self._backend.get(self._socket, self._events) & self._input:
            asyncio.get_running_loop().call_soon(self._drain)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close(linger=0)


async def echo(path: str) -> None:
    """Returns bytes over a Unix socket."""
    server = await asyncio.get_running_loop().create_unix_server(EchoProtocol, path)
    await server.serve_forever()


async def sink(path: str) -> None:
    """Reads LARGE bytes at a time from a Unix socket, in a blocking loop, and acknowledges them with one byte."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    connection, _ = listener.accept()
    buffer, left = bytearray(CHUNK), LARGE
    while received := connection.recv_into(buffer):
        left -= received
        if left == 0:
            connection.send(b"!")
            left = LARGE


async def plain_zmq(path: str) -> None:
    """Receives one frame by zmq.asyncio and acknowledges it."""
    receiver = zmq.asyncio.Context().socket(zmq.REP)
    receiver.bind(f"ipc://{path}")
    while True:
        await receiver.recv(copy=False)
        await receiver.send(b"!")


async def router(path: str) -> None:
    """Returns frames over a raw ZeroMQ socket."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(f"ipc://{path}")
    bare = BareSocket(socket, 2, lambda message: bare.send(message))
    await asyncio.get_running_loop().create_future()


REMOTE_ENDS = {"echo": echo, "sink": sink, "zmq": plain_zmq, "router": router}


# ---- limits ----------------------------------------------------------------------------------------------


class _EchoClient(EchoProtocol):
    """Sends a payload to the echo process and waits for it to return."""

    def data_received(self, data: bytes) -> None:
        self._answer.set_result(data)

    async def ask(self, payload: bytes) -> bytes:
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._transport.write(payload)
        return await self._answer


class _ZmqEchoClient(BareSocket):
    """Sends a payload to the router process over a raw ZeroMQ socket and waits for it to return."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        super().__init__(socket, 1, lambda message: self._answer.set_result(message))

    async def ask(self, payload: bytes) -> list[bytes]:
        self._answer: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self.send([payload])
        return await self._answer


@asynccontextmanager
async def machine_limits(folder: Path) -> AsyncIterator["MachineLimits"]:
    """Runs the processes that limits are measured against."""
    with ExitStack() as scope:
        paths = _start_remote_ends(folder, scope)
        transport, client = await asyncio.get_running_loop().create_unix_connection(_EchoClient, str(paths["echo"]))
        scope.callback(transport.close)
        sink = scope.enter_context(socket.socket(socket.AF_UNIX))
        sink.connect(str(paths["sink"]))
        context = zmq.asyncio.Context()
        scope.callback(context.destroy, linger=0)
        plain = context.socket(zmq.REQ)
        plain.connect(f"ipc://{paths['zmq']}")
        raw_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        scope.callback(raw_context.destroy, linger=0)
        dealer = raw_context.socket(zmq.DEALER)
        dealer.connect(f"ipc://{paths['router']}")
        raw = _ZmqEchoClient(dealer)
        scope.callback(raw.close)
        yield MachineLimits(client, sink, plain, raw)


def _start_remote_ends(folder: Path, scope: ExitStack) -> dict[str, Path]:
    """Starts the processes, and waits until each listens on its path."""
    paths = {kind: folder / f"limit-{kind}" for kind in REMOTE_ENDS}
    for kind, path in paths.items():
        process = subprocess.Popen([sys.executable, "-m", __name__, kind, str(path)])
        scope.callback(process.wait, START_DEADLINE)
        scope.callback(process.kill)
    until = time.monotonic() + START_DEADLINE
    for path in paths.values():
        while not path.exists():
            if time.monotonic() > until:
                raise DeadlineExceeded(f"the process of {path} did not listen within {START_DEADLINE:g} s")
            time.sleep(START_CHECK)
    return paths


@dataclass(slots=True)
class MachineLimits:
    """Measures limits over connections to the remote ends."""

    echo: _EchoClient
    sink: socket.socket
    plain: "zmq.asyncio.Socket"
    raw: _ZmqEchoClient
    source: NDArray[np.uint8] = field(default_factory=lambda: np.ones(LARGE, np.uint8))
    target: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(LARGE, np.uint8))

    async def measure(self) -> dict[str, float]:
        echoes = percentiles(await seconds_of_async(lambda: self.echo.ask(b"x" * 64), ECHOES))
        over_zmq = percentiles(await seconds_of_async(lambda: self.raw.ask(b"x" * 64), ECHOES))
        hot = np.concatenate([values.view(np.uint8) for values in rollout().values()])
        copies = seconds_of(partial(np.copyto, hot.copy(), hot), 50)
        return {
            **echoes,
            **{f"zmq_{name}": value for name, value in over_zmq.items()},
            "memcpy_gb_s": gigabytes_per_second(seconds_of(partial(np.copyto, self.target, self.source), 5)),
            "memcpy_hot_gb_s": gigabytes_per_second(copies, len(hot)),
            "unix_gb_s": gigabytes_per_second(seconds_of(self._through_socket, 3)),
            "zmq_gb_s": gigabytes_per_second(await seconds_of_async(self._through_zmq, 3)),
        }

    def _through_socket(self) -> None:
        for start in range(0, LARGE, CHUNK):
            self.sink.sendall(self.source[start : start + CHUNK].data)
        self.sink.recv(1)

    async def _through_zmq(self) -> None:
        await self.plain.send(self.source.data, copy=False)
        await self.plain.recv()


if __name__ == "__main__":
    asyncio.run(REMOTE_ENDS[sys.argv[1]](sys.argv[2]))
