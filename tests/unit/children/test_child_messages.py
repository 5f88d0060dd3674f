"""Messages through pipes: whatever the pieces in which they come, and as few writes as turns of the loop."""

import asyncio
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from asyncrl.children.child_messages import (
    LARGEST,
    TRACEBACK,
    WRITTEN_AT_ONCE,
    BatchedPipe,
    greeting,
    packed,
    received,
    trace,
    where_to_write,
)
from asyncrl.errors import ConfigError, WireError

MESSAGES: list[Any] = [{"call": 1}, "x" * 100_000, [None, 2.5], {"said": ["é"]}]


async def read_in_pieces(data: bytes, size: int) -> list[Any]:
    reader = asyncio.StreamReader()
    found: list[Any] = []

    async def read() -> None:
        async for message in received(reader):
            found.append(message)

    reading = asyncio.create_task(read())
    for first in range(0, len(data), size):
        reader.feed_data(data[first : first + size])
        await asyncio.sleep(0)
    reader.feed_eof()
    await reading
    return found


@pytest.mark.parametrize("size", [1013, 3, 2**20])
async def test_messages_come_whole_from_any_pieces(size: int) -> None:
    small = [message for message in MESSAGES if size > 3 or not isinstance(message, str)]
    assert await read_in_pieces(b"".join(map(packed, small)), size) == small


async def test_a_message_that_ends_too_early_is_none() -> None:
    assert await read_in_pieces(packed("whole") + packed("cut off")[:-1], 2**20) == ["whole"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ((LARGEST + 1).to_bytes(4, "little"), f"a frame of {LARGEST + 1} bytes was announced"),
        (b"\x01\x00\x00\x00\xc1", "a frame of 1 bytes that is no MessagePack"),
    ],
)
async def test_what_is_no_message_is_refused_after_those_before(data: bytes, why: str) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(packed("before") + data)
    reader.feed_eof()
    messages = received(reader)
    assert await anext(messages) == "before"
    with pytest.raises(WireError, match=why):
        await anext(messages)


@contextmanager
def pipe() -> Iterator[tuple[int, BatchedPipe]]:
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    try:
        yield readable, BatchedPipe(writable)
    finally:
        os.close(readable)
        os.close(writable)


async def test_messages_of_one_turn_of_the_loop_are_written_together() -> None:
    with pipe() as (readable, batched):
        batched.send(1)
        batched.send(2)
        with pytest.raises(BlockingIOError):
            os.read(readable, 100)
        await asyncio.sleep(0)
        assert os.read(readable, 100) == packed(1) + packed(2)
        batched.send(3)
        await asyncio.sleep(0)
        assert os.read(readable, 100) == packed(3)


async def test_many_bytes_do_not_wait_for_the_end_of_the_turn() -> None:
    with pipe() as (readable, batched):
        batched.send("small")
        batched.send("x" * WRITTEN_AT_ONCE)
        assert os.read(readable, 2**16) == packed("small") + packed("x" * WRITTEN_AT_ONCE)
        await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            os.read(readable, 100)


def deep(error: Exception) -> Exception:
    for number in range(200):
        error.add_note(f"note {number} " + "x" * 100)
    return error


def test_the_end_of_a_long_traceback_is_reported() -> None:
    text = trace(deep(ValueError("no")))
    assert len(text) == TRACEBACK
    assert "note 199" in text


def test_the_first_message_of_a_child_is_what_it_loaded_or_the_mistake_of_the_user() -> None:
    def raises(error: Exception) -> dict[str, object]:
        raise error

    assert greeting("reward.functions", lambda: {"concurrent": [True]}) == {"concurrent": [True]}
    assert greeting("reward.functions", lambda: raises(ConfigError("write it so"))) == {"mistake": "write it so"}
    mistake = greeting("reward.functions", lambda: raises(ZeroDivisionError("by nothing")))["mistake"]
    assert mistake.startswith("reward.functions could not be loaded: ZeroDivisionError: by nothing\nTraceback")


def test_a_traceback_begins_with_the_users_first_line() -> None:
    def broken() -> dict[str, object]:
        return {"a": 1 / 0}  # type: ignore[dict-item]

    mistake = greeting("reward.functions", broken)["mistake"]
    first = next(line for line in mistake.splitlines() if line.lstrip().startswith("File "))
    assert first.endswith("in broken")


def wrapped(error: Exception) -> Exception:
    try:
        raise RuntimeError("the cache cannot be opened") from error
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "advised"),
    [
        (OSError(30, "Read-only file system", "/home/me/log.txt"), True),
        (wrapped(OSError(30, "Read-only file system", "/home/me/cache")), True),
        (sqlite3.OperationalError("attempt to write a readonly database"), True),
        (sqlite3.OperationalError("unable to open database file"), True),
        (OSError(28, "No space left on device", "/tmp/log.txt"), False),
        (FileNotFoundError(2, "No such file or directory", "log.txt"), False),
        (ValueError("30"), False),
    ],
)
def test_an_error_of_a_read_only_file_system_names_the_sandbox(error: Exception, advised: bool) -> None:
    assert ("children.writable" in where_to_write(error)) == advised

    def load() -> dict[str, object]:
        raise error

    assert ("children.writable" in greeting("reward.functions", load)["mistake"]) == advised
