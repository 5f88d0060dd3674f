"""Sends many small calls to one socket as fast as they are taken: `python -m asyncrl.bench.flood ADDRESS COUNT KIND`.

KIND: "messages", of which only the last is answered, or "calls", as many at a time as the worker gives credit for.
"""

import sys

import zmq

from asyncrl.protocols.messages import PROTOCOL, Call, Hello
from asyncrl.wire.codec import encode
from asyncrl.wire.ends import CREDIT, HIGH_WATER
from asyncrl.wire.line import numbered

PATIENCE = 60_000
"""Milliseconds for one message."""
RUN = Hello("bench", 0, "controller", 0, "flood", PROTOCOL, "")


def main(address: str, count: int, kind: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.sndhwm = socket.rcvhwm = HIGH_WATER
    socket.sndtimeo = socket.rcvtimeo = PATIENCE
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
    socket.recv()  # of a sender that leaves, a receiver with a full queue loses what it has not taken yet


def _make_calls(socket: "zmq.Socket[bytes]", count: int) -> None:
    def send(number: int, message: object) -> None:
        socket.send_multipart(numbered(number, encode(message)))

    send(0, RUN)
    socket.recv_multipart()
    for call in range(count):
        send(call + 1, Call(call, "echo", (call,), 60.0))
        if call >= CREDIT:
            socket.recv_multipart()
    for _ in range(min(count, CREDIT)):
        socket.recv_multipart()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
