"""Measures limits of the machine: memcpy, an asyncio echo, a Unix socket, zmq.asyncio, and the control lane's
socket without calls.

The remote ends run in processes of their own: `python -m asyncrl.bench.transfer_speed.machine_limits KIND PATH`.
"""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from asyncrl.bench.rivals.call_timing import (
    LARGE,
    gigabytes_per_second,
    percentiles,
    rollout,
    seconds_of,
    seconds_of_async,
)
from asyncrl.errors import DeadlineExceeded
from asyncrl.lanes.control.wire import Frame
from asyncrl.lanes.control.zmq_wire import ZmqCaller, ZmqWire

ECHOES = 1000
CHUNK = 2**20
START_DEADLINE = 10.0
START_CHECK = 0.001
"""Seconds for a remote end to listen, and between two looks whether it does."""


# ---- remote ends -----------------------------------------------------------------------------------------


class EchoProtocol(asyncio.Protocol):
    """Returns the bytes that it receives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


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
    buffer = bytearray(CHUNK)
    left = LARGE
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


async def wire(path: str) -> None:
    """Returns frames over the socket of the control lane, without calls."""
    own = ZmqWire()
    listener = own.listen(f"ipc://{path}")

    def back(message: tuple[bytes, list[Frame]]) -> None:
        listener.offer(*message)

    await listener.pump(back)


REMOTE_ENDS = {"echo": echo, "sink": sink, "zmq": plain_zmq, "wire": wire}


# ---- limits ----------------------------------------------------------------------------------------------


class _EchoClient(EchoProtocol):
    """Sends a payload to the echo process and waits for it to return."""

    def data_received(self, data: bytes) -> None:
        self._answer.set_result(data)

    async def ask(self, payload: bytes) -> bytes:
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._transport.write(payload)
        return await self._answer


class _WireClient:
    """Sends a payload to the wire process over the socket of the control lane and waits for it to return."""

    def __init__(self, caller: ZmqCaller) -> None:
        self._caller = caller
        self.receiving = asyncio.ensure_future(caller.pump(lambda frames: self._answer.set_result(frames)))

    async def ask(self, payload: bytes) -> list[Frame]:
        self._answer: asyncio.Future[list[Frame]] = asyncio.get_running_loop().create_future()
        self._caller.offer([payload])
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
        own = scope.enter_context(closing(ZmqWire()))
        over_wire = _WireClient(own.connect(f"ipc://{paths['wire']}"))
        scope.callback(over_wire.receiving.cancel)
        yield MachineLimits(client, sink, plain, over_wire)


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
    over_wire: _WireClient
    source: NDArray[np.uint8] = field(default_factory=lambda: np.ones(LARGE, np.uint8))
    target: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(LARGE, np.uint8))

    async def measure(self) -> dict[str, float]:
        echoes = percentiles(await seconds_of_async(lambda: self.echo.ask(b"x" * 64), ECHOES))
        over_zmq = percentiles(await seconds_of_async(lambda: self.over_wire.ask(b"x" * 64), ECHOES))
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
