"""The row of a prompt is encoded once for its group, and decoded once where its samples are scored."""

import asyncio
import threading
from typing import Any

import msgpack
import numpy as np
import pytest

from asyncrl.errors import WireError
from asyncrl.lanes.control.message_codec import decode, encode
from asyncrl.protocols.prompt_row import PackedRow, PromptRow
from asyncrl.rewards import row_cache
from asyncrl.rewards.execution.child_server import plain_samples, samples_of
from asyncrl.rewards.row_cache import INLINE_BYTES, RowCache
from asyncrl.rewards.sample import Sample, with_columns
from tests import golden

COLUMNS: dict[str, Any] = {"prompt": "solve", "tests": [[1, [2, 3]], ["a", b"b", None, 0.5]], "deep": {"x": [True]}}


def sent(row: PromptRow) -> PackedRow:
    packed: PackedRow = decode(encode(row))
    return packed


async def test_a_row_is_encoded_once_and_decoded_once_for_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    packs = []
    pack = msgpack.packb
    monkeypatch.setattr(msgpack, "packb", lambda *args, **named: packs.append(1) or pack(*args, **named))
    row = PromptRow(COLUMNS)
    cache = RowCache()
    found = await asyncio.gather(*(cache.row(sent(row)) for _ in range(8)))
    assert len(packs) == cache.decoded == 1
    assert all(each is found[0] for each in found)
    assert found[0] == COLUMNS
    assert np.array_equal(found[0].packed.data, row.packed.data)
    plain_samples([Sample("solve", "t", found[0], 0, member, "stop", 1) for member in range(8)])
    assert len(packs) == 1


async def test_a_large_row_is_decoded_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    unpack = msgpack.unpackb

    def noted(*args: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        return unpack(*args, **named)

    monkeypatch.setattr(msgpack, "unpackb", noted)
    large, small = ({"prompt": "p", "x": "y" * size} for size in (INLINE_BYTES, INLINE_BYTES // 2))
    cache = RowCache()
    assert await cache.row(PromptRow(large).packed) == large
    assert await cache.row(PromptRow(small).packed) == small
    assert threads[0] != threading.get_ident() == threads[1]


async def test_the_cache_is_bounded_and_keeps_what_was_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [PromptRow({"prompt": str(number), "x": "y" * 1000}).packed for number in range(4)]
    monkeypatch.setattr(row_cache, "CACHED_BYTES", 3 * len(rows[0].data))
    cache = RowCache()
    for number in (0, 1, 2, 0, 3, 0, 1):
        assert (await cache.row(rows[number]))["prompt"] == str(number)
    assert cache.decoded == 5  # 0 to 3, and 1 again.
    assert len(cache._rows) == 3
    monkeypatch.setattr(row_cache, "CACHED_BYTES", 1)
    for row in rows:
        await cache.row(row)
    assert len(cache._rows) == 1


async def test_a_row_that_an_algorithm_made_is_taken_as_it_is() -> None:
    row = await RowCache().row({**PromptRow(COLUMNS), "prompt": "other"})
    assert (row["prompt"], row["tests"]) == ("other", COLUMNS["tests"])


def test_a_shared_row_cannot_be_changed_unseen() -> None:
    row = PromptRow(COLUMNS)
    for change in (lambda: row.update(x=1), lambda: row.pop("prompt"), lambda: row.__setitem__("x", 1), row.clear):
        with golden.raises(TypeError):
            change()
    assert row == COLUMNS


def test_a_value_that_cannot_be_sent_is_named() -> None:
    for value in (2**64, "\ud800", object()):
        with pytest.raises(WireError, match="row of a prompt cannot be sent"):
            encode(PromptRow({"prompt": "p", "x": value}))


def test_each_sample_has_a_row_of_its_own_where_functions_run() -> None:
    row = PromptRow(COLUMNS)
    shared = [Sample("solve", "t", row, 3, member, "stop", 1) for member in range(2)]
    message = plain_samples(shared)
    assert len(message["rows"]) == 1
    for first, second in (samples_of(message), [with_columns(sample) for sample in shared]):
        first.row["tests"][0].append("changed")
        assert second.row == COLUMNS == row
        assert (second.prompt, second.text, second.group, second.member) == ("solve", "t", 3, 1)
