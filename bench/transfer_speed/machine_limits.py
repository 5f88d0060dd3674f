"""Measures limits of the machine: memcpy, an asyncio echo, a Unix socket, zmq.asyncio, and raw ZeroMQ sockets.

The remote ends run in processes of their own: `python -m asyncrl.bench.transfer_speed.machine_limits KIND PATH`.
"""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from asyncrl.bench.control_latency.message_flood import TICK, start_flood, ticking
from asyncrl.bench.rivals.timed_rounds import (
    LARGE,
    gigabytes_per_second,
    percentiles,
    rollout,
    seconds_of,
    seconds_of_async,
)
from asyncrl.errors import DeadlineExceeded
from asyncrl.lanes.control.zmq_wire import ZmqWire

ECHOES = 1000
FLOOD = 60_000
CHUNK = 2**20
START_DEADLINE, FLOOD_DEADLINE = 10.0, 60.0


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


class _ZmqEchoClient:
    """Sends a payload to the router process over a raw ZeroMQ socket and waits for it to return."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = BareSocket(socket, 1, lambda message: self._answer.set_result(message))

    async def ask(self, payload: bytes) -> list[bytes]:
        self._answer: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self.socket.send([payload])
        return await self._answer


@asynccontextmanager
async def machine_limits(folder: Path, environment: Mapping[str, str]) -> AsyncIterator["MachineLimits"]:
    """Runs the processes that limits are measured against. environment: of these processes."""
    with ExitStack() as scope:
        paths = _start_remote_ends(folder, environment, scope)
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
        scope.callback(raw.socket.close)
        yield MachineLimits(folder, environment, client, sink, plain, raw)


def _start_remote_ends(folder: Path, environment: Mapping[str, str], scope: ExitStack) -> dict[str, Path]:
    """Starts the processes, and waits until each listens on its path."""
    paths = {kind: folder / f"limit-{kind}" for kind in REMOTE_ENDS}
    for kind, path in paths.items():
        process = subprocess.Popen([sys.executable, "-m", __name__, kind, str(path)], env=environment)
        scope.callback(process.wait, START_DEADLINE)
        scope.callback(process.kill)
    until = time.monotonic() + START_DEADLINE
    for path in paths.values():
        while not path.exists():
            if time.monotonic() > until:
                raise DeadlineExceeded(f"the process of {path} did not listen within {START_DEADLINE:g} s")
            time.sleep(TICK)
    return paths


@dataclass(slots=True)
class MachineLimits:
    """Measures limits; environment: of the process that sends a flood."""

    folder: Path
    environment: Mapping[str, str]
    echo: _EchoClient
    sink: socket.socket
    plain: "zmq.asyncio.Socket"
    raw: _ZmqEchoClient
    source: NDArray[np.uint8] = field(default_factory=lambda: np.ones(LARGE, np.uint8))
    target: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(LARGE, np.uint8))

    async def measure(self) -> dict[str, float]:
        """Measures all limits, and a flood of messages through a socket of zmq.asyncio."""
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
            **await self._flood(_receive_plain, "zmq"),
        }

    def _through_socket(self) -> None:
        for start in range(0, LARGE, CHUNK):
            self.sink.sendall(self.source[start : start + CHUNK].data)
        self.sink.recv(1)

    async def _through_zmq(self) -> None:
        await self.plain.send(self.source.data, copy=False)
        await self.plain.recv()

    async def flood_ours(self) -> dict[str, float]:
        """Measures the flood of `measure` through the socket of the control lane."""
        return await self._flood(_receive_ours, "ours")

    async def _flood(self, receive: Any, name: str) -> dict[str, float]:
        """Returns CPU microseconds per message, and the longest delay in ms of a task that wakes every TICK."""
        address = f"ipc://{self.folder}/flood-{name}"
        with ticking() as ticks:
            async with asyncio.timeout(FLOOD_DEADLINE):
                sender = await start_flood(address, FLOOD, "messages", self.environment)
                spent = await receive(address)
                await sender.wait()
        return {f"flood_{name}_us": spent / (FLOOD - 1) * 1e6, f"stall_{name}_ms": 1e3 * ticks.stall}


async def _receive_plain(address: str) -> float:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 1000
        router.bind(address)
        await router.recv_multipart()
        begun = time.process_time()
        for _ in range(FLOOD - 1):
            peer, _ = await router.recv_multipart()
        spent = time.process_time() - begun
        await router.send_multipart([peer, b"all received"])
        return spent


async def _receive_ours(address: str) -> float:
    wire, marks, done = ZmqWire(), list[float](), asyncio.get_running_loop().create_future()
    listener, left = wire.listen(address), FLOOD

    def count(message: tuple[bytes, Any]) -> None:
        nonlocal left
        left -= 1
        if left in (0, FLOOD - 1):
            marks.append(time.process_time())
        if left == 0:
            done.set_result(message[0])

    receiving = asyncio.ensure_future(listener.pump(count))
    try:
        listener.offer(await done, [b"all received"])
        await asyncio.sleep(2 * TICK)
    finally:
        receiving.cancel()
        wire.close()
    return marks[1] - marks[0]


if __name__ == "__main__":
    asyncio.run(REMOTE_ENDS[sys.argv[1]](sys.argv[2]))
