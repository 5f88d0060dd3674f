"""Messages between a worker and its children, through pipes: a length of four bytes, then MessagePack; and the texts
that errors of the user's code become.

What comes at once is read at once, and what is said in one turn of an event loop is written at once: with thousands of
small messages, system calls and wake-ups would cost more than what they say.
"""

import asyncio
import os
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from asyncrl.children.guard_program import STDERR, STDIN, STDOUT
from asyncrl.errors import ConfigError, WireError
from asyncrl.lanes.bounded_msgpack import unpacked

LARGEST = 64 * 2**20
"""Bytes; a group of a thousand samples of 16k characters fits twice."""
CONTAINERS = 2**18
ITEMS = 2**23
"""Lists and tables of a message, and items in all of them: a thousand episodes of a hundred turns, the rewards of seven
million tokens. What a contained child writes is decoded in a worker that nothing contains."""
HEAD = 4
BLOCK = 2**16
"""Bytes that are read at once: what a pipe holds."""
WRITTEN_AT_ONCE = 2**13
"""Bytes of messages that wait for the end of a turn of the loop: the other side goes on with a hundred small ones."""


def packed(message: Any) -> bytes:
    """Returns the frame of a message; raises WireError when it is too large."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    if len(body) > LARGEST:
        raise WireError(f"a message to or from a child process has {len(body)} bytes; at most {LARGEST} are sent")
    return len(body).to_bytes(HEAD, "little") + body


async def receive(reader: asyncio.StreamReader) -> Any:
    """Reads the next message; raises asyncio.IncompleteReadError at the end, WireError for anything malformed."""
    size = _body_size(await reader.readexactly(HEAD))
    return _unpacked(await reader.readexactly(size))


async def received(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """Yields all messages up to the end, and waits only when none is there. Raises WireError for anything malformed. A
    message that ends too early is none."""
    waiting = bytearray()
    while block := await reader.read(BLOCK):
        waiting += block
        first = 0
        while len(waiting) - first >= HEAD:
            begin = first + HEAD
            size = _body_size(waiting[first:begin])
            if len(waiting) < begin + size:
                break
            first = begin + size
            yield _unpacked(waiting[begin:first])
        del waiting[:first]


def _body_size(head: bytes | bytearray) -> int:
    size = int.from_bytes(head, "little")
    if size > LARGEST:
        raise WireError(f"a frame of {size} bytes was announced; at most {LARGEST} are sent")
    return size


def _unpacked(body: bytes | bytearray) -> Any:
    try:
        return unpacked(body, CONTAINERS, ITEMS, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a frame of {len(body)} bytes that is no MessagePack: {error!r:.200}") from error


def send(pipe: int, message: Any) -> None:
    """Writes a message; blocks while the pipe is full, which the worker always reads."""
    _write(pipe, packed(message))


def _write(pipe: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


@dataclass(eq=False, slots=True)
class BatchedPipe:
    """Writes the messages of one turn of the event loop together, or as soon as they are WRITTEN_AT_ONCE. It blocks
    while the pipe is full, which the worker always reads."""

    _pipe: int
    _frames: bytearray = field(default_factory=bytearray)

    def send(self, message: Any) -> None:
        """Takes a message; raises WireError when it is too large."""
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames += packed(message)
        if len(self._frames) >= WRITTEN_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        frames = bytes(self._frames)
        self._frames.clear()
        _write(self._pipe, frames)


async def open_pipes() -> tuple[asyncio.StreamReader, int]:
    """Returns copies of stdin and stdout in a child; the user's code then reads nothing and prints to stderr."""
    calls = os.dup(STDIN)
    results = os.dup(STDOUT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    os.dup2(STDERR, STDOUT)
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(calls, "rb"))
    return reader, results


# Turns errors of the user's code into text for the worker.


OWN = str(Path(__file__).parents[1]) + os.sep
TRACEBACK = 4000
"""Characters of a traceback that are reported: its end, where the error is."""

READ_ONLY = ("[Errno 30]", "readonly database", "unable to open database file")
"""Texts of errors of Python and of SQLite in a file system that is read-only."""


def trace(error: BaseException) -> str:
    """Returns the end of an error's traceback, without the frames of asyncrl that called the user's code."""
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename.startswith((OWN, "<frozen ")):
        first = first.tb_next
    return "".join(traceback.format_exception(type(error), error, first or error.__traceback__))[-TRACEBACK:]


def where_to_write(error: BaseException) -> str:
    """Returns where contained code may write, as the end of a sentence, for an error that says that it wrote elsewhere;
    "" for other errors."""
    if not any(each in trace(error) for each in READ_ONLY):
        return ""
    return (
        "; this code runs in a sandbox, where it may write only to its own empty /tmp, /var/tmp, /run and /dev/shm: "
        "name the folder of the file in children.writable"
    )


def greeting(key: str, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the first message of a child: what `load` returns, or the mistake of the user that it met. key: of the
    config, which names what is loaded."""
    try:
        return load()
    except ConfigError as error:
        return {"mistake": str(error)}
    except Exception as error:  # loading imports the user's file, which runs the user's code
        raised = f"{type(error).__name__}: {error}{where_to_write(error)}"
        return {"mistake": f"{key} could not be loaded: {raised}\n{trace(error)}"}
