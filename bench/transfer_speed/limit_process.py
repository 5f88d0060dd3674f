"""Runs the remote end of a machine limit: `python -m asyncrl.bench.transfer_speed.limit_process KIND PATH`.

echo: asyncio returns bytes over a Unix socket. sink: a blocking loop reads LARGE bytes at a time from a Unix socket and
acknowledges them with one byte. zmq: zmq.asyncio receives one frame and acknowledges it. router: a raw ZeroMQ socket,
read in the same way as the socket of the control lane, returns frames.
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


class EchoProtocol(asyncio.Protocol):
    """Returns the bytes that it receives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def echo(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(EchoProtocol, path)
    await server.serve_forever()


def sink(path: str) -> None:
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
    receiver = zmq.asyncio.Context().socket(zmq.REP)
    receiver.bind(f"ipc://{path}")
    while True:
        await receiver.recv(copy=False)
        await receiver.send(b"!")


class BareSocket:
    """Moves messages of `frames` frames over a raw ZeroMQ socket on an event loop: a lower bound for a call."""

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


async def router(path: str) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(f"ipc://{path}")
    bare = BareSocket(socket, 2, lambda message: bare.send(message))
    await asyncio.get_running_loop().create_future()


def main(kind: str, path: str) -> None:
    if kind == "sink":
        sink(path)
    else:
        asyncio.run({"echo": echo, "zmq": plain_zmq, "router": router}[kind](path))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
