import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from structlog.testing import capture_logs

from asyncrl.errors import ArenaFull, LostRows
from asyncrl.lanes.data.row_store import RowStore, RowTable, bytes_of_slot, open_rows
from asyncrl.lanes.shared_memory import TWO_THREAD_BYTES, segment_name
from asyncrl.protocols.batch import Place

SLOTS, SLOT_BYTES = 3, 256
NAME = segment_name("aa", 1, "w0.0-1-ab", "rows")


@pytest.fixture(params=["shared", "heap"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "heap":
        return RowStore.private("inproc://w.data#w", SLOTS, SLOT_BYTES)
    return RowStore.shared(NAME, SLOTS, SLOT_BYTES, tmp_path)


def row(value: int, length: int = 5) -> dict[str, Any]:
    return {
        "tokens": np.full(length, value, np.int32),
        "logprobs": np.full(length, value, np.float32),
        "mask": np.full(3, value, np.uint8),
        "versions": np.full(0, value, np.int64),
    }


def test_rows_come_back_in_any_order_of_columns(store: Any) -> None:
    place = store.put(row(7))
    mask, tokens, versions = store.read(place, ["mask", "tokens", "versions"])
    assert tokens.tolist() == [7] * 5
    assert tokens.dtype == np.int32
    assert mask.tolist() == [7] * 3
    assert (len(versions), versions.dtype) == (0, np.int64)
    assert place.columns == ("tokens", "logprobs", "mask", "versions")


def test_a_row_is_the_stores_own_copy(store: Any) -> None:
    values = row(1)
    place = store.put(values)
    values["tokens"][:] = 9
    (tokens,) = store.read(place, ["tokens"])
    assert tokens.tolist() == [1] * 5


def test_a_full_store_is_an_error_until_a_row_is_freed(store: Any) -> None:
    places = [store.put(row(value)) for value in range(SLOTS)]
    with pytest.raises(ArenaFull, match=f"all {SLOTS} row slots"):
        store.put(row(9))
    assert store.used == SLOTS
    store.free(places[1:2])
    assert store.read(store.put(row(9)), ["mask"])[0][0] == 9
    assert store.read(places[0], ["mask"])[0][0] == 0


def test_a_freed_row_is_lost_also_before_its_slot_is_written_again(store: Any) -> None:
    place = store.put(row(1))
    store.free([place])
    with pytest.raises(LostRows, match="no longer holds"):
        store.read(place, ["mask"])
    for _ in range(SLOTS):
        store.put(row(2))
    with pytest.raises(LostRows):
        store.read(place, ["mask"])


def test_freeing_twice_or_for_others_frees_nothing(store: Any) -> None:
    place = store.put(row(1))
    store.free([Place("shm://other", place.slot, place.write_count, place.columns)])
    store.free([Place(place.owner, place.slot, place.write_count + 2, place.columns)])
    store.free([Place(place.owner, 99, 2, ()), Place(place.owner, -1, 2, ())])
    assert store.used == 1
    store.free([place, place])
    assert store.used == 0
    for value in range(SLOTS):
        store.put(row(value))
    store.free([place])
    assert store.used == SLOTS


def test_freed_slots_are_used_again_last(store: Any) -> None:
    place = store.put(row(1))
    store.free([place])
    assert store.put(row(2)).slot != place.slot


@pytest.mark.parametrize(
    "columns",
    [
        {"x": np.zeros((2, 2), np.float32)},
        {"x": np.zeros(2, np.float16)},
        {"x": np.zeros(2, np.float64)},
        {"x": np.zeros(SLOT_BYTES + 1, np.uint8)},
        {f"x{i}": np.zeros(1, np.uint8) for i in range(17)},
    ],
)
def test_what_is_no_row_is_refused(store: Any, columns: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="row"):
        store.put(columns)
    assert store.used == 0


def test_the_longest_row_fits_in_the_bytes_computed_for_it(tmp_path: Path) -> None:
    longest = row(1, 11)
    size = bytes_of_slot({name: (values.dtype, len(values)) for name, values in longest.items()})
    RowStore.shared(NAME, 1, size, tmp_path).put(longest)
    with pytest.raises(ValueError, match="a slot takes"):
        RowStore.shared(NAME + "2", 1, size - 8, tmp_path).put(longest)


def test_a_closed_store_leaves_no_file(tmp_path: Path) -> None:
    store = RowStore.shared(NAME, SLOTS, SLOT_BYTES, tmp_path)
    assert (tmp_path / NAME).exists()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_too_little_shared_memory_falls_back_to_the_heap_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with capture_logs() as logs, monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        store = open_rows(NAME, 1, 64, "ipc:///w.data#w", tmp_path)
    assert store.address == "ipc:///w.data#w"
    assert store.read(store.put(row(3)), ["mask"])[0][0] == 3
    (entry,) = logs
    assert "no room for" in entry["reason"]
    assert open_rows(NAME, 1, 64, "ipc:///w.data#w", tmp_path).address == f"shm://{NAME}"


def test_a_slot_that_is_written_meanwhile_leads_nobody_astray(tmp_path: Path) -> None:
    store = RowStore.shared(NAME, SLOTS, SLOT_BYTES, tmp_path)
    place = store.put(row(1))
    words = np.frombuffer(store.segment.buffer, np.int64, 4, store._start(place.slot))
    for position, value in ((1, 99), (2, 77), (2, -1), (3, -5), (3, 2**62), (3, SLOT_BYTES)):
        before = words[position]
        words[position] = value
        with pytest.raises(LostRows, match="overwritten"):
            store.read(place, ["tokens"])
        words[position] = before
    assert store.read(place, ["tokens"])[0].tolist() == [1] * 5


def test_rows_sent_as_frames_can_be_read_until_the_data_lane_ends_after_its_store() -> None:
    store = RowStore.private("inproc://w.data#w", SLOTS, SLOT_BYTES)
    place = store.put(row(1))
    store.close()
    assert store.read(place, ["mask"])[0].tolist() == [1] * 3


def test_a_segment_of_something_else_holds_no_rows(tmp_path: Path) -> None:
    store = RowStore.shared(NAME, SLOTS, SLOT_BYTES, tmp_path)
    np.frombuffer(store.segment.buffer, np.int64, 1, 0)[0] = 1
    with pytest.raises(LostRows, match="holds no rows"):
        RowTable(store.segment)


class RowsModel(RuleBasedStateMachine):
    """Whatever was put and not freed is there; whatever was freed is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.store = RowStore.private("inproc://w", SLOTS, SLOT_BYTES)
        self.held: dict[Place, int] = {}
        self.gone: list[Place] = []

    @rule(value=st.integers(0, 255))
    def put(self, value: int) -> None:
        if len(self.held) == SLOTS:
            with pytest.raises(ArenaFull):
                self.store.put(row(value))
        else:
            self.held[self.store.put(row(value))] = value

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            place = data.draw(st.sampled_from(list(self.held)))
            self.store.free([place])
            del self.held[place]
            self.gone.append(place)

    @invariant()
    def all_is_as_expected(self) -> None:
        assert self.store.used == len(self.held)
        for place, value in self.held.items():
            assert self.store.read(place, ["mask"])[0].tolist() == [value] * 3
        for place in self.gone:
            with pytest.raises(LostRows):
                self.store.read(place, ["mask"])

    def teardown(self) -> None:
        self.store.close()


class SharedRowsModel(RowsModel):
    def __init__(self) -> None:
        super().__init__()
        self.store = RowStore.shared(segment_name("aa", 1, f"model{id(self)}", "rows"), SLOTS, SLOT_BYTES)


TestPrivateRows = RowsModel.TestCase
TestSharedRows = SharedRowsModel.TestCase
for case in (TestPrivateRows, TestSharedRows):
    case.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_a_long_column_between_others_is_stored_whole(tmp_path: Path) -> None:
    long = np.arange(TWO_THREAD_BYTES // 4 + 3, dtype=np.int32)
    columns = {"before": np.full(3, 7, np.uint8), "long": long, "after": np.arange(5)}
    size = bytes_of_slot({name: (values.dtype, len(values)) for name, values in columns.items()})
    store = RowStore.shared(NAME, 2, size, tmp_path)
    found = store.read(store.put(columns), list(columns))
    for values, expected in zip(found, columns.values(), strict=True):
        assert np.array_equal(values, expected)
    store.close()
