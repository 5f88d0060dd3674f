"""Measures limits of the machine: memcpy, an asyncio echo, a Unix socket, zmq.asyncio, and raw ZeroMQ sockets."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import zmq
import zmq.asyncio

from asyncrl.bench.control_latency.flood_sender import start_flood
from asyncrl.bench.control_latency.loop_stalls import TICK, ticking
from asyncrl.bench.rivals import timed_rounds
from asyncrl.bench.transfer_speed.limit_process import CHUNK, LARGE, BareSocket
from asyncrl.errors import DeadlineExceeded
from asyncrl.lanes.control.zmq_wire import ZmqWire

ECHOES = 1000
FLOOD = 60_000
START_DEADLINE, FLOOD_DEADLINE = 10.0, 60.0


class _EchoClient(asyncio.Protocol):
    """Sends a payload to the echo process and waits for it to return."""

    _answer: asyncio.Future[bytes]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._answer.set_result(data)

    async def ask(self, payload: bytes) -> bytes:
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(payload)
        return await self._answer


class _ZmqEchoClient:
    """Sends a payload to the echo process over a raw ZeroMQ socket and waits for it to return."""

    _answer: asyncio.Future[list[bytes]]

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.connect(address)
        self._socket = BareSocket(socket, 1, lambda message: self._answer.set_result(message))

    def close(self) -> None:
        self._socket.close()
        self._context.destroy(linger=0)

    async def ask(self, payload: bytes) -> list[bytes]:
        self._answer = asyncio.get_running_loop().create_future()
        self._socket.send([payload])
        return await self._answer


class MachineLimits:
    """Runs the processes that limits are measured against. environment: of these processes."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._scope = ExitStack()
        self._source = np.ones(LARGE, np.uint8)
        self._target = np.zeros(LARGE, np.uint8)

    async def __aenter__(self) -> Self:
        paths = {kind: self._start(kind) for kind in ("echo", "sink", "zmq", "router")}
        for path in paths.values():
            _wait_for(path)
        loop = asyncio.get_running_loop()
        transport, self._echo = await loop.create_unix_connection(_EchoClient, str(paths["echo"]))
        self._scope.callback(transport.close)
        self._sink = self._scope.enter_context(socket.socket(socket.AF_UNIX))
        self._sink.connect(str(paths["sink"]))
        context = zmq.asyncio.Context()
        self._scope.callback(context.destroy, linger=0)
        self._zmq = context.socket(zmq.REQ)
        self._zmq.connect(f"ipc://{paths['zmq']}")
        self._dealer = _ZmqEchoClient(f"ipc://{paths['router']}")
        self._scope.callback(self._dealer.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.close()

    def _start(self, kind: str) -> Path:
        path = self._folder / f"limit-{kind}"
        command = [sys.executable, "-m", "asyncrl.bench.transfer_speed.limit_process", kind, str(path)]
        process = subprocess.Popen(command, env=self._environment)
        self._scope.callback(process.wait, START_DEADLINE)
        self._scope.callback(process.kill)
        return path

    async def measure(self) -> dict[str, float]:
        echoes = await timed_rounds.percentiles_async(lambda: self._echo.ask(b"x" * 64), ECHOES)
        over_zmq = await timed_rounds.percentiles_async(lambda: self._dealer.ask(b"x" * 64), ECHOES)
        return {
            **echoes,
            **{f"zmq_{name}": value for name, value in over_zmq.items()},
            "memcpy_gb_s": LARGE / timed_rounds.milliseconds(lambda: np.copyto(self._target, self._source), 5) / 1e6,
            "memcpy_hot_gb_s": _hot_copies(),
            "unix_gb_s": LARGE / timed_rounds.milliseconds(self._through_socket, 3) / 1e6,
            "zmq_gb_s": LARGE / await timed_rounds.milliseconds_async(self._through_zmq, 3) / 1e6,
            **await _flood(self._folder, self._environment, _receive_plain, "zmq"),
        }

    def _through_socket(self) -> None:
        for start in range(0, LARGE, CHUNK):
            self._sink.sendall(self._source[start : start + CHUNK].data)
        self._sink.recv(1)

    async def _through_zmq(self) -> None:
        await self._zmq.send(self._source.data, copy=False)
        await self._zmq.recv()

    async def flood_ours(self) -> dict[str, float]:
        """Measures the flood of `measure` through the socket of the control lane."""
        return await _flood(self._folder, self._environment, _receive_ours, "ours")


def _hot_copies() -> float:
    tensors = timed_rounds.rollout()
    source = np.concatenate([values.view(np.uint8) for values in tensors.values()])
    target = source.copy()
    return len(source) / timed_rounds.milliseconds(lambda: np.copyto(target, source), 50) / 1e6


def _wait_for(path: Path) -> None:
    """Waits until the process that was just started listens on this path."""
    until = time.monotonic() + START_DEADLINE
    while not path.exists():
        if time.monotonic() > until:
            raise DeadlineExceeded(f"the process of {path} did not listen within {START_DEADLINE:g} s")
        time.sleep(TICK)


# ---- a flood of small messages -------------------------------------------------------------------------------


async def _flood(folder: Path, environment: Mapping[str, str], receive: Any, name: str) -> dict[str, float]:
    """Returns CPU microseconds per message, and the longest delay in ms of a task that wakes every TICK."""
    address = f"ipc://{folder}/flood-{name}"
    with ticking() as ticks:
        async with asyncio.timeout(FLOOD_DEADLINE):
            sender = await start_flood(address, FLOOD, "messages", environment)
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
