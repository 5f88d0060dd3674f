"""Sends many small messages to one socket as fast as the receiver accepts them.

    python -m asyncrl.bench.control_latency.flood_sender ADDRESS COUNT KIND

KIND: "messages", of which only the last gets a reply, or "calls", with as many in flight as the worker grants credit.
"""

import asyncio
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping

import zmq

from asyncrl.lanes.control.message_codec import encode, numbered
from asyncrl.lanes.control.wire import CREDIT, HIGH_WATER
from asyncrl.protocols.messages import PROTOCOL, Call, Hello

MESSAGE_DEADLINE = 60_000
"""Milliseconds for one message."""
HELLO = Hello("bench", 0, "controller", 0, "flood", PROTOCOL, "")


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
        if kind == "messages":
            _send_messages(socket, count)
        else:
            _make_calls(socket, count)
    finally:
        context.destroy(linger=0)


def _send_messages(socket: "zmq.Socket[bytes]", count: int) -> None:
    for _ in range(count):
        socket.send(b"x" * 64)
    socket.recv()  # A receiver with a full queue would lose the messages of a sender that ends early.


def _make_calls(socket: "zmq.Socket[bytes]", count: int) -> None:
    def send(number: int, message: object) -> None:
        socket.send_multipart(numbered(number, encode(message)))

    send(0, HELLO)
    socket.recv_multipart()
    for call in range(count):
        send(call + 1, Call(call, "echo", (call,), 60.0))
        if call >= CREDIT:
            socket.recv_multipart()
    for _ in range(min(count, CREDIT)):
        socket.recv_multipart()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
