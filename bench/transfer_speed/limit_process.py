"""The other end of the limits of `asyncrl-bench channels`: `python -m asyncrl.bench.bare_peer KIND PATH`.

echo: bytes over a Unix socket, by asyncio. sink: takes LARGE bytes at a time from a Unix socket, blocking, and says so
with one byte. zmq: the same from a socket of zmq.asyncio, as one frame. router: frames from a raw ZeroMQ socket, which
is read as ours is, with nothing around it.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

LARGE = 64 * 2**20
CHUNK = 2**20


class Echo(asyncio.Protocol):
    """Sends back what comes in."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def echo(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(Echo, path)
    await server.serve_forever()


def sink(path: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    connection, _ = listener.accept()
    room, left = bytearray(CHUNK), LARGE
    while taken := connection.recv_into(room):
        left -= taken
        if left == 0:
            connection.send(b"!")
            left = LARGE


async def plain_zmq(path: str) -> None:
    taking = zmq.asyncio.Context().socket(zmq.REP)
    taking.bind(f"ipc://{path}")
    while True:
        await taking.recv(copy=False)
        await taking.send(b"!")


class BareSocket:
    """A raw socket on an event loop, messages of `frames` frames: what a call over ZeroMQ cannot be faster than."""

    _backend: Any = zmq.backend.Socket
    _now, _events, _input = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)

    def __init__(self, socket: "zmq.Socket[bytes]", frames: int, take: Callable[[list[bytes]], None]) -> None:
        self._socket, self._frames, self._take = socket, frames, take
        asyncio.get_running_loop().add_reader(socket.fileno(), self._look)
        self._look()

    def _look(self) -> None:
        while self._backend.get(self._socket, self._events) & self._input:
            self._take([self._backend.recv(self._socket, self._now) for _ in range(self._frames)])

    def send(self, message: list[bytes]) -> None:
        for frame in message[:-1]:
            self._backend.send(self._socket, frame, self._now | int(zmq.SNDMORE), True)
        self._backend.send(self._socket, message[-1], self._now, True)
        if self._backend.get(self._socket, self._events) & self._input:
            asyncio.get_running_loop().call_soon(self._look)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close(linger=0)


async def router(path: str) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(f"ipc://{path}")
    end = BareSocket(socket, 2, lambda message: end.send(message))
    await asyncio.get_running_loop().create_future()


def main(kind: str, path: str) -> None:
    if kind == "sink":
        sink(path)
    else:
        asyncio.run({"echo": echo, "zmq": plain_zmq, "router": router}[kind](path))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
