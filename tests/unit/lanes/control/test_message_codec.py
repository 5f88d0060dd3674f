import asyncio
import contextlib
import dataclasses
import itertools
import random
from typing import Any, TypeVar

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import TypeAliasType

from asyncrl.errors import WireError
from asyncrl.lanes.control import field_checks, message_codec
from asyncrl.lanes.control.message_codec import (
    DTYPES,
    INLINE_BYTES,
    MAX_DEPTH,
    MAX_PLANS,
    SHORTEST,
    MessageSequence,
    decode,
    encode,
    numbered,
)
from asyncrl.lanes.control.wire import Frame, Wakeup
from asyncrl.protocols.batch import Batch, BatchRef, Column, Cuts, Place, RowRef
from asyncrl.protocols.messages import WIRE_TYPES, Call, Hello, PromptGroup, Reply, Score
from asyncrl.protocols.prompt_row import PackedRow, PromptRow

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.binary()
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    PLAIN | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(TEXT, inner, max_size=4)
    ),
    max_leaves=20,
)


def row(group: int, member: int) -> RowRef:
    places = (Place("shm://a", member, 2, ("tokens", "logprobs")), Place("ipc:///b", 1, 4, ("reference_logprobs",)))
    return RowRef(group, member, 0, 1, 5, 100, 3, 4, "stop", places, reward=1, advantage=None)


@pytest.mark.parametrize(("scalar", "refused"), [(np.int64, np.float32), (Any, None)])
def test_arrays_are_checked_where_numpy_hides_them_behind_an_alias(
    scalar: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy 2.5 does so, and needs a newer Python than the one that runs this test may be."""
    of = TypeVar("of")
    alias = TypeAliasType("NDArray", np.ndarray[Any, np.dtype[of]], type_params=(of,))
    monkeypatch.setattr(field_checks, "NDArray", alias)
    check = field_checks.check_for(alias[scalar])
    value = np.zeros(2, np.int64)
    assert check(value) is value
    if refused is not None:
        with pytest.raises(WireError, match="expected an array of int64"):
            check(value.astype(refused))


@given(VALUES)
def test_plain_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    again = decode(encode(value))
    assert repr(again) == repr(value)


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 20), max_size=3))
def test_arrays_come_back(dtype: Any, shape: list[int]) -> None:
    array = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)
    again = decode(encode([array, array]))
    for copy in again:
        assert copy.dtype == array.dtype
        assert copy.shape == array.shape
        assert np.array_equal(copy, array)
        assert not copy.flags.writeable


def test_large_arrays_travel_untouched_in_frames_of_their_own() -> None:
    small = np.zeros(INLINE_BYTES - 1, np.uint8)
    large = np.zeros(INLINE_BYTES, np.uint8)
    strided = np.arange(1000.0).reshape(10, 100)[:, ::3]
    assert np.array_equal(decode(encode(strided)), strided)
    frames = encode((small, large))
    assert len(frames) == 2
    large[0] = 7
    assert frames[1][0] == 7


def test_every_message_of_a_training_call_comes_back() -> None:
    refs = BatchRef(tuple(row(group, member) for group in range(3) for member in range(4)))
    call = Call(7, "step", (Cuts(1, 4, refs, 1200, 12),), 60.0)
    assert decode(encode(call)) == call
    prompt = PromptGroup(1, 0, 1, [{"role": "user", "content": "2+2"}], (0, 1), 5, 0, 1.0, 64, 30.0)
    assert decode(encode(prompt)) == prompt
    batch = Batch({"tokens": Column.of([np.arange(300, dtype=np.int32), np.arange(2, dtype=np.int32)])})
    assert [list(r) for r in decode(encode(batch))["tokens"]] == [list(r) for r in batch["tokens"]]


def test_last_fields_with_their_defaults_do_not_travel() -> None:
    scored = row(1, 2)
    for sent, fields in (
        (scored._replace(turn_advantages=(1.0,)), 17),
        (scored, 11),
        (scored._replace(reward=None), 10),
    ):
        (frame,) = encode(sent)
        _, tree = msgpack.unpackb(frame)
        assert len(tree) == 1 + fields
        assert decode([frame]) == sent
    with pytest.raises(WireError, match="a RowRef with 9 fields; it has 20"):
        decode([msgpack.packb([[], tree[:10]])])


def test_numpy_scalars_travel_as_plain_ones() -> None:
    again = decode(encode({"reward": np.float32(0.5), "steps": np.int64(3)}))
    assert again == {"reward": 0.5, "steps": 3}
    assert type(again["steps"]) is int


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, {1: 2}, np.zeros(3, np.float16), 2**64, "\ud800", [object]])
def test_a_value_that_cannot_be_sent_is_refused_with_its_type(value: Any) -> None:
    with pytest.raises(WireError, match=r"cannot be sent|are text"):
        encode(value)


def test_too_deep_a_value_is_refused_by_both_ends() -> None:
    value: Any = None
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    with pytest.raises(WireError, match="nested"):
        encode(value)
    tree: Any = None
    for _ in range(MAX_DEPTH + 1):
        tree = [0, tree]
    with pytest.raises(WireError, match="nested"):
        decode([msgpack.packb([[], tree])])


def test_a_message_over_the_limit_is_refused_by_both_ends() -> None:
    frames = encode(np.zeros(1000, np.uint8))
    with pytest.raises(WireError, match="more than the 900"):
        encode(np.zeros(1000, np.uint8), 900)
    with pytest.raises(WireError, match="at most 900"):
        decode(frames, 900)


@pytest.mark.parametrize(
    "field", [{"deadline": "1"}, {"call": True}, {"args": [1]}, {"method": b"x"}, {"method": None}]
)
def test_a_field_of_another_type_is_named(field: dict[str, Any]) -> None:
    call = dataclasses.replace(Call(0, "step", (), 1.0), **field)
    with pytest.raises(WireError, match=rf"Call\.{next(iter(field))}: expected"):
        decode(encode(call))


@pytest.mark.parametrize(
    "value",
    [
        Score(1.0, {"a": "b"}),  # type: ignore[dict-item]
        Place("a", 0, 0, ("x", 1)),  # type: ignore[arg-type]
        BatchRef((Place("a", 0, 0, ()),)),  # type: ignore[arg-type]
        PromptGroup(0, 0, 0, ["text"], (), 0, 0, 1.0, 1, 1.0),  # type: ignore[list-item]
    ],
)
def test_fields_are_checked_inside_containers(value: Any) -> None:
    with pytest.raises(WireError):
        decode(encode(value))


def array_of(dtype: int, shape: list[int], where: Any) -> list[bytes]:
    return [msgpack.packb([[8], [2, dtype, shape, where]]), b"12345678"]


@pytest.mark.parametrize(
    "frames",
    [
        array_of(3, [2], 0),
        array_of(3, [2**62, 2**62], 0),
        array_of(3, [-1], 0),
        array_of(3, [1], 1),
        array_of(3, [1], -1),
        array_of(99, [1], 0),
        array_of(3, [1] * 9, 0),
        array_of(1, [0, 2**63], b""),
        array_of(0, [8], 0),
        [msgpack.packb([[9], [2, 3, [1], 0]]), b"12345678"],
        [msgpack.packb([[8], None]), b"12345678"],
        [msgpack.packb([[8], [0, [2, 3, [1], 0], [2, 3, [1], 0]]]), b"12345678"],
        [msgpack.packb([[], [1000]])],
        [msgpack.packb([[], []])],
        [msgpack.packb([[], [3]])],
        [msgpack.packb(None)],
        [],
        [b""],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\xc7\x01\x05a"],
        [b"\x91" * 2000],
    ],
)
def test_lies_about_sizes_and_kinds_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


def test_offsets_that_wrap_around_are_refused() -> None:
    wrapping = np.array([0, 2**63 - 1, -(2**63), -1, 3], np.int64)
    tree = [
        3 + [cls.__name__ for cls in WIRE_TYPES].index("Column"),
        [2, 1, [3], b"abc"],
        [2, 3, [5], wrapping.tobytes()],
    ]
    with pytest.raises(WireError, match="offsets"):
        decode([msgpack.packb([[], tree])])


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=300), max_size=4))
def test_any_bytes_are_refused_or_decoded(frames: list[bytes]) -> None:
    decoded_or_refused(frames)


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_message_is_refused_or_decoded(data: st.DataObject) -> None:
    message = Call(
        1, "step", (Cuts(1, 4, BatchRef((row(1, 2),)), 3, 1), np.arange(100), Hello("r", 1, "a", 0, "b", 1, "c")), 1.0
    )
    frames = [bytearray(frame) for frame in encode(message)]
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(frames[0]) - 1))
        frames[0][position] = data.draw(st.integers(0, 255))
    decoded_or_refused([bytes(frame) for frame in frames])


@settings(max_examples=200)
@given(VALUES)
def test_any_tree_is_refused_or_decoded(tree: Any) -> None:
    decoded_or_refused([msgpack.packb([[], tree])])


def decoded_or_refused(frames: list[bytes]) -> None:
    try:
        decode(frames)
    except WireError:
        return


def test_types_that_were_good_once_let_no_others_pass() -> None:
    """What is remembered of a message is the types of all its fields together."""
    good = Call(0, "step", ([1],), 1.0)
    for _ in range(3):
        assert decode(encode(good)) == good
        for field in ({"deadline": "1"}, {"args": ([1], object)}, {"method": b""}):
            with pytest.raises(WireError):
                decode(encode(dataclasses.replace(good, **field)))
        assert type(decode(encode(dataclasses.replace(good, deadline=5))).deadline) is float


def test_what_is_remembered_of_strange_messages_is_bounded() -> None:
    scalars = [None, True, 1, 1.0, "a", b"a"]
    for kinds in itertools.product(scalars, repeat=4):
        with contextlib.suppress(WireError):
            decode(encode(Call(1, "a", kinds, 1.0)))
        value = Reply(1, kinds[0]), RowRef(*kinds, *kinds, "a", (), *kinds[:2])  # type: ignore[arg-type, call-arg]
        with contextlib.suppress(WireError):
            decode(encode(value))
    assert max(len(codec._to_read) for codec in message_codec._CODECS) < 100
    assert len(message_codec._CODEC_OF[RowRef]._to_lower) == MAX_PLANS


@pytest.mark.parametrize("value", [[1, 2], ["a"], [], (1, 2), {"a": 1}, [[1], [2]], {"a": [1]}])
def test_a_message_that_comes_again_is_read_again(value: Any) -> None:
    """What is remembered of the first is which fields need no reading, and these do."""
    for call in range(3):
        assert decode([bytes(frame) for frame in encode(Reply(call, value))]) == Reply(call, value)


# The prompt_row of a prompt travels once on a connection, and both sides know the same rows.


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


def prompt_row(number: int, size: int = 90_000) -> PromptRow:
    return PromptRow({"prompt": f"prompt {number}", "tests": str(number) * size})


def score(number: int, prompt_row: PromptRow | PackedRow) -> Call:
    return Call(number, "score", (("a sample",), prompt_row), 60.0)


async def test_the_row_of_a_group_travels_once_with_the_calls_of_its_samples() -> None:
    line = Line()
    of_group = prompt_row(1)
    for member in range(16):
        await line.sender.send(score(member, of_group))
    assert line.sizes[0] > 90_000
    assert max(line.sizes[1:]) < 200
    assert all(PromptRow.of(call.args[1]) == of_group for call in line.received)


async def test_a_short_row_travels_with_each_call() -> None:
    line = Line()
    short = prompt_row(1, size=SHORTEST // 2)
    for member in range(2):
        await line.sender.send(score(member, short))
    assert line.sizes[0] == line.sizes[1]


async def test_both_sides_forget_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_codec, "KEPT_BYTES", 10_000)
    line = Line()
    chance = random.Random(0)
    rows = [prompt_row(number, size=chance.choice([10, 400, 3000, 11_000])) for number in range(12)]
    for number in range(500):
        chosen = chance.choices(rows, k=chance.randint(1, 3))
        await line.sender.send(Call(number, "score", tuple(chosen), 60.0))
        assert [PromptRow.of(arg) for arg in line.received[-1].args] == chosen
    kept = line._reader._received_rows._rows
    assert sum(size for size, _ in kept.values()) <= 10_000
    assert list(kept) == list(line.sender._sent_rows._rows)


async def test_a_row_is_known_only_once_its_call_was_sent() -> None:
    line = Line()
    of_group = prompt_row(1)
    line.full = True
    assert not line.sender.offer(score(0, of_group))
    line.full = False
    assert line.sender.offer(score(1, of_group))
    assert PromptRow.of(line.received[0].args[1]) == of_group


async def test_a_call_that_waits_for_others_names_no_row_that_they_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_codec, "KEPT_BYTES", 5000)
    line = Line()
    first = prompt_row(1, size=4000)
    second = prompt_row(2, size=4000)
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
