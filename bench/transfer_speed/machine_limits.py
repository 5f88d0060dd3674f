"""What the machine itself can do: memcpy, a bare asyncio echo, a Unix socket, ZeroMQ as it comes, and its sockets with
nothing around them."""

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

from asyncrl.bench.bare_peer import CHUNK, LARGE, BareSocket
from asyncrl.bench.peers import rounds
from asyncrl.bench.ticking import TICK, ticking
from asyncrl.errors import DeadlineExceeded
from asyncrl.wire.ends import pour
from asyncrl.wire.socket import ZmqWire

ECHOES = 1000
FLOOD = 60_000
START_DEADLINE, FLOOD_DEADLINE = 10.0, 60.0


class _Answers(asyncio.Protocol):
    """The asking end of an echo."""

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


class _Dealer:
    """The asking end of an echo over ZeroMQ."""

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


class Limits:
    """Processes to measure against, alive while it is entered. environment: theirs."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._scope = ExitStack()
        self._source, self._target = np.ones(LARGE, np.uint8), np.zeros(LARGE, np.uint8)

    async def __aenter__(self) -> Self:
        paths = {kind: self._start(kind) for kind in ("echo", "sink", "zmq", "router")}
        for path in paths.values():
            _wait_for(path)
        loop = asyncio.get_running_loop()
        transport, self._echo = await loop.create_unix_connection(_Answers, str(paths["echo"]))
        self._scope.callback(transport.close)
        self._sink = self._scope.enter_context(socket.socket(socket.AF_UNIX))
        self._sink.connect(str(paths["sink"]))
        context = zmq.asyncio.Context()
        self._scope.callback(context.destroy, linger=0)
        self._zmq = context.socket(zmq.REQ)
        self._zmq.connect(f"ipc://{paths['zmq']}")
        self._dealer = _Dealer(f"ipc://{paths['router']}")
        self._scope.callback(self._dealer.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.close()

    def _start(self, kind: str) -> Path:
        path = self._folder / f"bare-{kind}"
        command = [sys.executable, "-m", "asyncrl.bench.bare_peer", kind, str(path)]
        process = subprocess.Popen(command, env=self._environment)
        self._scope.callback(process.wait, START_DEADLINE)
        self._scope.callback(process.kill)
        return path

    async def measure(self) -> dict[str, float]:
        echoes = await rounds.percentiles_async(lambda: self._echo.ask(b"x" * 64), ECHOES)
        over_zmq = await rounds.percentiles_async(lambda: self._dealer.ask(b"x" * 64), ECHOES)
        return {
            **echoes,
            **{f"zmq_{name}": value for name, value in over_zmq.items()},
            "memcpy_gb_s": LARGE / rounds.milliseconds(lambda: np.copyto(self._target, self._source), 5) / 1e6,
            "memcpy_hot_gb_s": _hot_copies(),
            "unix_gb_s": LARGE / rounds.milliseconds(self._through_socket, 3) / 1e6,
            "zmq_gb_s": LARGE / await rounds.milliseconds_async(self._through_zmq, 3) / 1e6,
            **await _flood(self._folder, self._environment, _take_plainly, "zmq"),
        }

    def _through_socket(self) -> None:
        for start in range(0, LARGE, CHUNK):
            self._sink.sendall(self._source[start : start + CHUNK].data)
        self._sink.recv(1)

    async def _through_zmq(self) -> None:
        await self._zmq.send(self._source.data, copy=False)
        await self._zmq.recv()

    async def flood_ours(self) -> dict[str, float]:
        """The same flood through our socket."""
        return await _flood(self._folder, self._environment, _take_by_ours, "ours")


def _hot_copies() -> float:
    tensors = rounds.rollout()
    source = np.concatenate([values.view(np.uint8) for values in tensors.values()])
    target = source.copy()
    return len(source) / rounds.milliseconds(lambda: np.copyto(target, source), 50) / 1e6


def _wait_for(path: Path) -> None:
    """Until a process that was just started listens there."""
    until = time.monotonic() + START_DEADLINE
    while not path.exists():
        if time.monotonic() > until:
            raise DeadlineExceeded(f"{path} was not made within {START_DEADLINE:g} s")
        time.sleep(TICK)


# ---- a flood of small messages -------------------------------------------------------------------------------


async def _flood(folder: Path, environment: Mapping[str, str], take: Any, name: str) -> dict[str, float]:
    """CPU of this process for each message, and how late a task was that wakes every TICK."""
    address = f"ipc://{folder}/flood-{name}"
    command = [sys.executable, "-m", "asyncrl.bench.flood", address, str(FLOOD), "messages"]
    with ticking() as ticks:
        async with asyncio.timeout(FLOOD_DEADLINE):
            sender = await asyncio.create_subprocess_exec(*command, env=dict(environment))
            spent = await take(address)
            await sender.wait()
    return {f"flood_{name}_us": spent / (FLOOD - 1) * 1e6, f"stall_{name}_ms": 1e3 * ticks.stall}


async def _take_plainly(address: str) -> float:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as taking:
        taking.linger = 1000
        taking.bind(address)
        await taking.recv_multipart()
        begun = time.process_time()
        for _ in range(FLOOD - 1):
            peer, _ = await taking.recv_multipart()
        spent = time.process_time() - begun
        await taking.send_multipart([peer, b"all of them"])
        return spent


async def _take_by_ours(address: str) -> float:
    wire, marks, done = ZmqWire(), list[float](), asyncio.get_running_loop().create_future()
    listener, left = wire.listen(address), FLOOD

    def take(message: tuple[bytes, Any]) -> None:
        nonlocal left
        left -= 1
        if left in (0, FLOOD - 1):
            marks.append(time.process_time())
        if left == 0:
            done.set_result(message[0])

    pouring = asyncio.ensure_future(pour(listener, take))
    try:
        await listener.send(await done, [b"all of them"])
        await asyncio.sleep(2 * TICK)
    finally:
        pouring.cancel()
        wire.close()
    return marks[1] - marks[0]
