"""Floods a socket with small messages from a process of its own, and records how long the event loop stalls meanwhile.

    python -m asyncrl.bench.control_latency.message_flood ADDRESS COUNT KIND

KIND: "messages", of which only the last gets a reply, or "calls", with as many in flight as the worker grants credit.
"""

import asyncio
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import zmq

from asyncrl.lanes.control.message_codec import encode, numbered
from asyncrl.lanes.control.wire import CREDIT, HIGH_WATER
from asyncrl.protocols.messages import PROTOCOL, Call, Hello

MESSAGE_DEADLINE = 60_000
"""Milliseconds for one message."""
HELLO = Hello("bench", 0, "controller", 0, "flood", PROTOCOL, "")
TICK = 0.001
"""Seconds from one tick to the next on a loop that has nothing else to do."""


async def start_flood(address: str, count: int, kind: str, environment: Mapping[str, str] | None = None) -> Process:
    """Starts a sender in a process of its own."""
    command = [sys.executable, "-m", __name__, address, str(count), kind]
    return await asyncio.create_subprocess_exec(*command, env=environment)


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


@dataclass(slots=True)
class Ticks:
    """Records the seconds between ticks: wall clock time, and CPU time of this thread, which other programs on the
    machine do not increase."""

    wall: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(self.wall)

    @property
    def stall(self) -> float:
        """Returns the longest delay of a tick in seconds; 0 without ticks."""
        return max(self.wall, default=TICK) - TICK


@contextmanager
def ticking() -> Iterator[Ticks]:
    """Records ticks while the block runs."""
    loop, ticks = asyncio.get_running_loop(), Ticks()
    timer: asyncio.TimerHandle

    def tick(wall: float, computing: float) -> None:
        nonlocal timer
        now, spent = loop.time(), time.thread_time()
        timer = loop.call_later(TICK, tick, now, spent)
        ticks.wall.append(now - wall)
        ticks.computing.append(spent - computing)

    timer = loop.call_later(TICK, tick, loop.time(), time.thread_time())
    try:
        yield ticks
    finally:
        timer.cancel()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
