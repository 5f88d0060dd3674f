"""Messages between a worker and its children, through pipes: a length of four bytes, then MessagePack."""

import asyncio
import os
from typing import Any

import msgpack

from asyncrl.children.guard_program import STDERR, STDIN, STDOUT
from asyncrl.errors import WireError

LARGEST = 64 * 2**20
"""Bytes; a group of a thousand samples of 16k characters fits twice."""


def packed(message: Any) -> bytes:
    """Returns the frame of a message; raises WireError when it is too large."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    if len(body) > LARGEST:
        raise WireError(f"a message to or from a child process has {len(body)} bytes; at most {LARGEST} are sent")
    return len(body).to_bytes(4, "little") + body


async def receive(reader: asyncio.StreamReader) -> Any:
    """Reads the next message; raises asyncio.IncompleteReadError at the end, WireError for anything malformed."""
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > LARGEST:
        raise WireError(f"a frame of {size} bytes was announced; at most {LARGEST} are sent")
    body = await reader.readexactly(size)
    try:
        return msgpack.unpackb(body, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a frame of {size} bytes that is no MessagePack: {error!r:.200}") from error


def send(pipe: int, message: Any) -> None:
    """Writes a message; blocks while the pipe is full, which the worker always reads."""
    rest = memoryview(packed(message))
    while rest:
        rest = rest[os.write(pipe, rest) :]


async def open_pipes() -> tuple[asyncio.StreamReader, int]:
    """Returns copies of stdin and stdout in a child; the user's code then reads nothing and prints to stderr."""
    calls, results = os.dup(STDIN), os.dup(STDOUT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    os.dup2(STDERR, STDOUT)
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(calls, "rb"))
    return reader, results
