"""The row of a prompt travels once on a connection, and both sides know the same rows."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import WireError
from asyncrl.lanes.control import message_codec
from asyncrl.lanes.control.message_codec import SHORTEST, MessageSequence, encode, numbered
from asyncrl.lanes.control.wire import Frame, Wakeup
from asyncrl.protocols.messages import Call
from asyncrl.protocols.prompt_row import PackedRow, PromptRow


class Line:
    """One direction of a connection that reads at once, or not at all while `full`. sizes: bytes of each message."""

    def __init__(self) -> None:
        self.room = Wakeup()
        self.full = False
        self.sizes: list[int] = []
        self.received: list[Any] = []
        self._reader = MessageSequence(lambda frames: True, Wakeup(), "sender")
        self.sender = MessageSequence(self._offer, self.room, "receiver")

    def _offer(self, frames: Any) -> bool:
        if self.full:
            return False
        self.sizes.append(sum(map(len, frames)))
        copies: list[Frame] = [bytes(frame) for frame in frames]
        self.received.append(self._reader.accept(copies))
        return True


def row(number: int, size: int = 90_000) -> PromptRow:
    return PromptRow({"prompt": f"prompt {number}", "tests": str(number) * size})


def score(number: int, row: PromptRow | PackedRow) -> Call:
    return Call(number, "score", (("a sample",), row), 60.0)


async def test_the_row_of_a_group_travels_once_with_the_calls_of_its_samples() -> None:
    line = Line()
    of_group = row(1)
    for member in range(16):
        await line.sender.send(score(member, of_group))
    assert line.sizes[0] > 90_000
    assert max(line.sizes[1:]) < 200
    assert all(PromptRow.of(call.args[1]) == of_group for call in line.received)


async def test_a_short_row_travels_with_each_call() -> None:
    line = Line()
    short = row(1, size=SHORTEST // 2)
    for member in range(2):
        await line.sender.send(score(member, short))
    assert line.sizes[0] == line.sizes[1]


async def test_both_sides_forget_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_codec, "KEPT_BYTES", 10_000)
    line = Line()
    chance = random.Random(0)
    rows = [row(number, size=chance.choice([10, 400, 3000, 11_000])) for number in range(12)]
    for number in range(2000):
        chosen = chance.choices(rows, k=chance.randint(1, 3))
        await line.sender.send(Call(number, "score", tuple(chosen), 60.0))
        assert [PromptRow.of(arg) for arg in line.received[-1].args] == chosen
    kept = line._reader._received_rows._rows
    assert sum(size for size, _ in kept.values()) <= 10_000
    assert list(kept) == list(line.sender._sent_rows._rows)


async def test_a_row_is_known_only_once_its_call_was_sent() -> None:
    line = Line()
    of_group = row(1)
    line.full = True
    assert not line.sender.offer(score(0, of_group))
    line.full = False
    assert line.sender.offer(score(1, of_group))
    assert PromptRow.of(line.received[0].args[1]) == of_group


async def test_a_call_that_waits_for_others_names_no_row_that_they_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_codec, "KEPT_BYTES", 5000)
    line = Line()
    first = row(1, size=4000)
    second = row(2, size=4000)
    await line.sender.send(score(0, first))
    line.full = True
    waiting = [
        asyncio.ensure_future(line.sender.send(score(number, each))) for number, each in ((1, second), (2, first))
    ]
    await asyncio.sleep(0)
    line.full = False
    while not all(sending.done() for sending in waiting):
        line.room.wake()
        await asyncio.sleep(0)
    assert [PromptRow.of(call.args[1]) for call in line.received] == [first, second, first]


def test_a_row_whose_bytes_never_came_is_refused() -> None:
    unknown = PackedRow(b"x" * 16, np.zeros(0, np.uint8))
    reader = MessageSequence(lambda frames: True, Wakeup(), "sender")
    with pytest.raises(WireError, match="whose bytes never came"):
        reader.accept(numbered(0, encode(score(0, unknown))))
