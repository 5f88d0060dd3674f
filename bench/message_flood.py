"""Floods a socket with small messages from a process of its own, and records how long the receiving loop stalls.

    python -m asyncrl.bench.message_flood ADDRESS COUNT KIND

is the sender. KIND: "messages", of which only the last gets a reply, or "calls", with as many in flight as the worker
grants credit.
"""

import asyncio
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from asyncrl.lanes.control.message_codec import encode, numbered
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import CREDIT, HIGH_WATER
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.protocols.messages import PROTOCOL, Call, Hello

FLOOD_DEADLINE = 600.0
"""Seconds for a flood to end."""
MESSAGE_DEADLINE = 60_000
"""Milliseconds for one message."""
HELLO = Hello("bench", 0, "controller", 0, "flood", PROTOCOL, "")
TICK = 0.001
"""Seconds from one tick to the next on a loop that has nothing else to do."""


# ---- sender ----------------------------------------------------------------------------------------------


def main(address: str, count: int, kind: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.sndhwm = socket.rcvhwm = HIGH_WATER
    socket.sndtimeo = socket.rcvtimeo = MESSAGE_DEADLINE
    socket.connect(address)
    try:
        if kind == "calls":
            _make_calls(socket, count)
        else:
            for _ in range(count):
                socket.send(b"x" * 64)
            socket.recv()  # A receiver with a full queue would lose the messages of a sender that ends early.
    finally:
        context.destroy(linger=0)


def _make_calls(socket: "zmq.Socket[bytes]", count: int) -> None:
    socket.send_multipart(numbered(0, encode(HELLO)))
    socket.recv_multipart()
    for call in range(count):
        socket.send_multipart(numbered(call + 1, encode(Call(call, "echo", (call,), 60.0))))
        if call >= CREDIT:
            socket.recv_multipart()
    for _ in range(min(count, CREDIT)):
        socket.recv_multipart()


# ---- receivers -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ticks:
    """Records the seconds between ticks: wall clock time, and CPU time of this thread, which other programs on the
    machine do not increase. process: CPU seconds of this process from the first tick to the last."""

    wall: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    process: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.wall)

    @property
    def stall(self) -> float:
        """Returns the longest delay of a tick in seconds."""
        return max(0.0, max(self.wall) - TICK)


@contextmanager
def ticking() -> Iterator[Ticks]:
    """Records ticks while the block runs."""
    loop = asyncio.get_running_loop()
    ticks = Ticks()
    before = (loop.time(), time.thread_time())
    began = time.process_time()
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal before, timer
        timer.cancel()
        timer = loop.call_later(TICK, tick)
        now = (loop.time(), time.thread_time())
        ticks.wall.append(now[0] - before[0])
        ticks.computing.append(now[1] - before[1])
        before = now

    timer = loop.call_later(TICK, tick)
    try:
        yield ticks
    finally:
        tick()  # The block may have kept the loop from every tick until now.
        timer.cancel()
        ticks.process = time.process_time() - began


async def receive_messages(address: str, count: int) -> Ticks:
    """Returns the ticks from the first message of a flood to the last, through the socket of the control lane."""
    arrived = asyncio.Queue[bytes]()
    received = 0

    def take(message: tuple[bytes, Any]) -> None:
        nonlocal received
        received += 1
        if received in (1, count):
            arrived.put_nowait(message[0])

    with closing(ZmqWire()) as wire:
        listener = wire.listen(address)
        async with _sender(address, count, "messages"):
            receiving = asyncio.ensure_future(listener.pump(take))
            await arrived.get()
            with ticking() as ticks:
                peer = await arrived.get()
            listener.offer(peer, [b"all received"])
        receiving.cancel()
    return ticks


async def receive_messages_plainly(address: str, count: int) -> Ticks:
    """Returns the ticks from the first message of a flood to the last, through a socket of zmq.asyncio."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        async with _sender(address, count, "messages"):
            await router.recv_multipart()
            with ticking() as ticks:
                for _ in range(count - 1):
                    peer, _ = await router.recv_multipart()
            await router.send_multipart([peer, b"all received"])
    return ticks


async def serve_calls(address: str, count: int) -> Ticks:
    """Returns the ticks from the first call of a flood to the last, which a server of the control lane answers."""
    begun = asyncio.Event()

    async def echo(call: Call) -> Any:
        begun.set()
        return call.args[0]

    with closing(ZmqWire()) as wire:
        listener = wire.listen(address)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(Server(listener, echo, HELLO).serve())
            async with _sender(address, count, "calls") as sender:
                await begun.wait()
                with ticking() as ticks:
                    await sender.wait()
            serving.cancel()
    return ticks


@asynccontextmanager
async def _sender(address: str, count: int, kind: str) -> AsyncIterator[Process]:
    """Starts the process that sends the flood, and waits for its end."""
    async with asyncio.timeout(FLOOD_DEADLINE):
        sender = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, address, str(count), kind)
        yield sender
        await sender.wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
