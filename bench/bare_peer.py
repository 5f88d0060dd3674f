"""The other end of the limits of `asyncrl-bench channels`: `python -m asyncrl.bench.bare_peer KIND PATH`.

echo: bytes over a Unix socket, by asyncio. sink: takes LARGE bytes at a time from a Unix socket, blocking, and says so
with one byte. zmq: the same from a socket of zmq.asyncio, as one frame.
"""

import asyncio
import socket
import sys

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


def main(kind: str, path: str) -> None:
    if kind == "sink":
        sink(path)
    else:
        asyncio.run({"echo": echo, "zmq": plain_zmq}[kind](path))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
