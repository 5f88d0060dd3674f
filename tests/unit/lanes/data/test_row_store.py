import errno
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from structlog.testing import capture_logs

from asyncrl.errors import ArenaFull, LostRows
from asyncrl.lanes.data import row_store
from asyncrl.lanes.data.row_store import (
    LEAST_GROWTH,
    UNIT,
    Heap,
    RowRetention,
    RowStore,
    RowTable,
    bytes_of_row,
    bytes_of_rows,
    open_rows,
    range_bytes,
)
from asyncrl.lanes.shared_memory import TWO_THREAD_BYTES, Segment, segment_name
from asyncrl.protocols.batch import Place
from tests.instruction_count import counting

SLOTS = 3
ROW_BYTES = 256
NAME = segment_name("aa", 1, "w0.0-1-ab", "rows")


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder of shared memory: its files have the blocks that they take, and holes take none."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(params=["shared", "heap"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "heap":
        return RowStore.private("inproc://w.data#w", SLOTS, ROW_BYTES)
    return RowStore.shared(NAME, SLOTS, ROW_BYTES, tmp_path)


def row(value: int, length: int = 5) -> dict[str, Any]:
    return {
        "tokens": np.full(length, value, np.int32),
        "logprobs": np.full(length, value, np.float32),
        "mask": np.full(3, value, np.uint8),
        "versions": np.full(0, value, np.int64),
    }


def test_rows_come_back_as_copies_in_any_order_of_columns(store: Any) -> None:
    values = row(7)
    place = store.put(values)
    values["tokens"][:] = 9
    mask, tokens, versions = store.read(place, ["mask", "tokens", "versions"])
    assert tokens.tolist() == [7] * 5
    assert tokens.dtype == np.int32
    assert mask.tolist() == [7] * 3
    assert (len(versions), versions.dtype) == (0, np.int64)
    assert place.columns == ("tokens", "logprobs", "mask", "versions")


def test_a_full_store_is_an_error_until_a_row_is_freed(store: Any) -> None:
    places = [store.put(row(value)) for value in range(SLOTS)]
    with pytest.raises(ArenaFull, match=f"all {SLOTS} row slots"):
        store.put(row(9))
    assert store.used == SLOTS
    store.free(places[1:2])
    assert store.read(store.put(row(9)), ["mask"])[0][0] == 9
    assert store.read(places[0], ["mask"])[0][0] == 0


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


def test_a_freed_row_is_lost_and_its_slot_used_again_last(store: Any) -> None:
    place = store.put(row(1))
    store.free([place])
    with pytest.raises(LostRows, match="no longer holds"):
        store.read(place, ["mask"])
    assert store.put(row(2)).slot != place.slot
    for _ in range(SLOTS - 1):
        store.put(row(2))
    with pytest.raises(LostRows):
        store.read(place, ["mask"])


@pytest.mark.parametrize(
    "columns",
    [
        {"x": np.zeros((2, 2), np.float32)},
        {"x": np.zeros(2, np.float16)},
        {"x": np.zeros(2, np.float64)},
        {"x": np.zeros(ROW_BYTES + 1, np.uint8)},
        {f"x{i}": np.zeros(1, np.uint8) for i in range(17)},
    ],
)
def test_what_is_no_row_is_refused(store: Any, columns: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="row"):
        store.put(columns)
    assert store.used == 0


def test_the_longest_row_fits_in_the_bytes_computed_for_it(tmp_path: Path) -> None:
    longest = row(1, 11)
    size = bytes_of_row({name: (values.dtype, len(values)) for name, values in longest.items()})
    RowStore.shared(NAME, 1, size, tmp_path).put(longest)
    with pytest.raises(ValueError, match="a row takes"):
        RowStore.shared(NAME + "2", 1, size - 8, tmp_path).put(longest)


def test_too_little_shared_memory_falls_back_to_the_heap_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with capture_logs() as logs, monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        store = open_rows(NAME, 1, ROW_BYTES, "ipc:///w.data#w", tmp_path)
    assert store.address == "ipc:///w.data#w"
    assert store.read(store.put(row(3)), ["mask"])[0][0] == 3
    (entry,) = logs
    assert "no room for" in entry["reason"]
    assert open_rows(NAME, 1, ROW_BYTES, "ipc:///w.data#w", tmp_path).address == f"shm://{NAME}"


def test_a_slot_that_is_written_meanwhile_leads_nobody_astray(tmp_path: Path) -> None:
    store = RowStore.shared(NAME, SLOTS, ROW_BYTES, tmp_path)
    place = store.put(row(1))
    words = np.frombuffer(store.segment.buffer, np.int64, store.segment.allocated // 8)
    entry = row_store._HEADER_WORDS + row_store._SLOT_WORDS * place.slot
    start = int(words[entry + 1]) // 8
    for position, values in {
        entry + 1: (-8, 2**62, 7, 8),
        entry + 2: (0, -1, 2**62),
        start: (99,),
        start + 1: (77, -1),
        start + 2: (-5, 2**62, ROW_BYTES),
    }.items():
        before = words[position]
        for value in values:
            words[position] = value
            with pytest.raises(LostRows, match="overwritten"):
                store.read(place, ["tokens"])
        words[position] = before
    assert store.read(place, ["tokens"])[0].tolist() == [1] * 5


def test_a_segment_of_something_else_holds_no_rows(tmp_path: Path) -> None:
    store = RowStore.shared(NAME, SLOTS, ROW_BYTES, tmp_path)
    np.frombuffer(store.segment.buffer, np.int64, 1, 0)[0] = 1
    with pytest.raises(LostRows, match="holds no rows"):
        RowTable(store.segment)
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_private_rows_can_be_read_until_the_data_lane_ends_after_their_store() -> None:
    store = RowStore.private("inproc://w.data#w", SLOTS, ROW_BYTES)
    place = store.put(row(1))
    store.close()
    assert store.read(place, ["mask"])[0].tolist() == [1] * 3


class RowsModel(RuleBasedStateMachine):
    """Whatever was put and not freed is there; whatever was freed is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.store = RowStore.private("inproc://w", SLOTS, ROW_BYTES)
        self.held: dict[Place, tuple[int, int]] = {}
        self.gone: list[Place] = []

    @rule(value=st.integers(0, 255), length=st.integers(0, 12))
    def put(self, value: int, length: int) -> None:
        if len(self.held) == SLOTS:
            with pytest.raises(ArenaFull):
                self.store.put(row(value, length))
        else:
            self.held[self.store.put(row(value, length))] = value, length

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
        for place, (value, length) in self.held.items():
            found = self.store.read(place, list(place.columns))
            for values, expected in zip(found, row(value, length).values(), strict=True):
                assert np.array_equal(values, expected)
        for place in self.gone:
            with pytest.raises(LostRows):
                self.store.read(place, ["mask"])

    def teardown(self) -> None:
        self.store.close()


class SharedRowsModel(RowsModel):
    def __init__(self) -> None:
        super().__init__()
        self.store = RowStore.shared(segment_name("aa", 1, f"model{id(self)}", "rows"), SLOTS, ROW_BYTES)


TestPrivateRows = RowsModel.TestCase
TestSharedRows = SharedRowsModel.TestCase
for case in (TestPrivateRows, TestSharedRows):
    case.settings = settings(max_examples=30, stateful_step_count=30)


def test_a_long_column_between_others_is_stored_whole(tmp_path: Path) -> None:
    long = np.arange(TWO_THREAD_BYTES // 4 + 3, dtype=np.int32)
    columns: dict[str, np.ndarray] = {"before": np.full(3, 7, np.uint8), "long": long, "after": np.arange(5)}
    size = bytes_of_row({name: (values.dtype, len(values)) for name, values in columns.items()})
    store = RowStore.shared(NAME, 2, size, tmp_path)
    found = store.read(store.put(columns), list(columns))
    for values, expected in zip(found, columns.values(), strict=True):
        assert np.array_equal(values, expected)
    store.close()


# ---- memory ----------------------------------------------------------------------------------------------------------

LONG = 2**20
"""Bytes of the longest row: the rows below are much shorter."""


def taken(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.iterdir())


def text(size: int, value: int = 1) -> dict[str, Any]:
    return {"text": np.full(size, value, np.uint8)}


def test_rows_take_the_bytes_that_they_have_and_not_those_of_the_longest(shm: Path) -> None:
    with closing(RowStore.shared(NAME, 4096, LONG, shm)) as store:
        assert taken(shm) < 256 * 1024
        for _ in range(1000):
            store.put(text(3000))
        assert 3000 * 1000 < store.bytes_used < 1.05 * 3000 * 1000
        assert taken(shm) < 1.1 * 3000 * 1000 + 256 * 1024


def test_the_estimate_of_full_memory_is_right_within_a_tenth(shm: Path) -> None:
    for slots, size in ((500, 3001), (20, LONG - 24)):
        with closing(RowStore.shared(NAME, slots, LONG, shm)) as store:
            for _ in range(slots):
                store.put(text(size))
            expected = bytes_of_rows(slots, bytes_of_row({"text": (np.dtype(np.uint8), size)}))
            assert abs(expected / taken(shm) - 1) < 0.1 or abs(expected - taken(shm)) < LEAST_GROWTH


def test_memory_of_freed_rows_is_used_again_whatever_their_lengths(shm: Path) -> None:
    lengths = np.random.default_rng(3).lognormal(8, 1.2, 5_000).astype(int).clip(1, LONG // 2).tolist()
    with closing(RowStore.shared(NAME, 512, LONG, shm)) as store:
        stored: list[tuple[int, Place]] = []
        most = 0
        for number, length in enumerate(lengths):
            stored.append((number, store.put(text(length, number % 251))))
            most = max(most, store.bytes_used)
            if len(stored) == 512:
                first = 8 * (number % 7)
                store.free([place for _, place in stored[first : first + 64]])
                del stored[first : first + 64]
        assert taken(shm) < 1.3 * most
        for number, place in stored:
            (found,) = store.read(place, ["text"])
            assert np.array_equal(found, text(lengths[number], number % 251)["text"])
        store.free([place for _, place in stored])
        assert (store.used, store.bytes_used) == (0, 0)


def test_a_reader_sees_rows_that_were_written_after_it_had_mapped_the_memory(shm: Path) -> None:
    with closing(RowStore.shared(NAME, 64, LONG, shm)) as store:
        first = store.put(text(100, 1))
        table = RowTable(Segment.open(NAME, directory=shm))
        (view,) = table.views(first, ["text"])
        places = [store.put(text(300_000, value)) for value in range(20)]
        for value, place in enumerate(places):
            assert (table.views(place, ["text"])[0] == value).all()
            table.check(place)
        assert (view == 1).all()
        late = store.put(text(500_000, 1))
        while store._heap.tail() > LEAST_GROWTH:
            late = store.put(text(500_000, 1))
        store.segment.unlink()
        with pytest.raises(LostRows, match="is gone"):
            table.views(late, ["text"])


def test_memory_that_runs_short_is_an_error_with_a_counter_and_leaves_the_other_rows(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 2**20
    allocate = os.posix_fallocate

    def until_it_is_full(descriptor: int, start: int, size: int) -> None:
        if start + size > left:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", until_it_is_full)
    with closing(RowStore.shared(NAME, 64, LONG, shm)) as store:
        fitting = (left - taken(shm)) // range_bytes(50_100)
        places = [store.put(text(50_000, value)) for value in range(fitting)]
        with pytest.raises(ArenaFull, match=r"no room for .* more.*--shm-size"):
            store.put(text(50_000))
        assert (store.refused, store.used) == (1, fitting)
        assert 0.9 * left < taken(shm) <= left
        for value, place in enumerate(places):
            assert (store.read(place, ["text"])[0] == value).all()
        store.free(places[3:4])
        store.read(store.put(text(50_000, 9)), ["text"])
        with pytest.raises(ArenaFull):
            store.put(text(50_000, 9))
        assert store.refused == 2


def test_a_full_file_system_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """In a child process: a page that cannot be allocated at its first write kills with SIGBUS."""
    script = 'mount -t tmpfs -o size=1m tmpfs "$0" || exit 77; exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, str(tmp_path), sys.executable, "-c", FILLS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this container may not mount a file system")
    assert (done.returncode, done.stdout) == (0, "full after 20\n"), done.stderr


FILLS = """
import sys
from pathlib import Path
import numpy as np
from asyncrl.errors import ArenaFull
from asyncrl.lanes.data.row_store import RowStore
store, count = RowStore.shared("asyncrl-a-1-w.rows", 64, 2**20, Path(sys.argv[1])), 0
try:
    while True:
        store.put({"text": np.full(50_000, 1, np.uint8)})
        count += 1
except ArenaFull:
    print("full after", count)
"""


# The ranges of a heap: apart from each other, joined when they are free, and few bytes lost between them.


@given(st.integers(1, 2**40))
def test_a_range_is_at_most_a_32nd_longer_than_what_it_holds(size: int) -> None:
    assert size <= range_bytes(size) < size * 33 / 32 + UNIT
    assert range_bytes(size) % UNIT == 0
    assert range_bytes(range_bytes(size)) == range_bytes(size) <= range_bytes(size + 1)


class HeapModel(RuleBasedStateMachine):
    """Ranges that are handed out never overlap; all that is free is found, in as few pieces as possible."""

    def __init__(self) -> None:
        super().__init__()
        self.heap = Heap()
        self.held: dict[int, int] = {}

    @rule(units=st.integers(1, 100))
    def grow(self, units: int) -> None:
        self.heap.grow(units * UNIT)

    @rule(size=st.integers(1, 3000))
    def allocate(self, size: int) -> None:
        longest = max((end - start for start, end in self._gaps()), default=0)
        start = self.heap.allocate(range_bytes(size))
        assert (start is not None) == (longest >= range_bytes(size))
        if start is not None:
            self.held[start] = size

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            start = data.draw(st.sampled_from(sorted(self.held)))
            self.heap.free(start, range_bytes(self.held.pop(start)))

    @invariant()
    def ranges_are_apart(self) -> None:
        ranges = sorted((start, start + range_bytes(size)) for start, size in self.held.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert all(start >= 0 and end <= self.heap.size for start, end in ranges)
        assert self.heap.used == sum(end - start for start, end in ranges)

    @rule()
    def ask_for_the_tail(self) -> None:
        gaps = self._gaps()
        assert self.heap.tail() == (gaps[-1][1] - gaps[-1][0] if gaps and gaps[-1][1] == self.heap.size else 0)

    def _gaps(self) -> list[tuple[int, int]]:
        edges = [0, *(edge for start in sorted(self.held) for edge in (start, start + range_bytes(self.held[start])))]
        edges.append(self.heap.size)
        return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]


TestHeap = HeapModel.TestCase
TestHeap.settings = settings(max_examples=30, stateful_step_count=60)


LONGEST = 160_000
LENGTHS: dict[str, Callable[[random.Random, float], float]] = {
    "lognormal": lambda chance, at: chance.lognormvariate(9, 1.2),
    "shrinking": lambda chance, at: chance.lognormvariate(11 - 5 * at, 0.7),
    "in phases": lambda chance, at: LONGEST if int(20 * at) % 2 else LONGEST / 7,
}
"""Lengths of answers in bytes, whose distribution may change over a run (`at` goes from 0 to 1)."""


@pytest.mark.parametrize("length_of", LENGTHS.values(), ids=LENGTHS)
def test_gaps_cost_less_than_a_fifth_whatever_the_lengths(length_of: Callable[[random.Random, float], float]) -> None:
    """Groups of eight rows die together, three of four in the order of their birth."""
    chance = random.Random(1)
    heap = Heap()
    groups = []
    alive = 0
    most = 0
    for number in range(1500):
        group = []
        for _ in range(8):
            length = int(min(LONGEST, max(200, length_of(chance, number / 1500))))
            while (start := heap.allocate(range_bytes(length))) is None:
                heap.grow(UNIT * 64)
            group.append((start, length))
        groups.append(group)
        alive += sum(length for _, length in group)
        most = max(most, alive)
        if len(groups) == 64:
            dying = groups.pop(0 if chance.random() < 0.75 else chance.randrange(64))
            alive -= sum(length for _, length in dying)
            for start, length in dying:
                heap.free(start, range_bytes(length))
    assert heap.size < 1.2 * most


# Rows are kept until their sample is released, at a cost of what is released.


def place(slot: int) -> Place:
    return Place("owner", slot, 1, ())


Kept = dict[tuple[int, int], tuple[int, Place]]


def kept_by_scan(kept: Kept, samples: list[tuple[int, int, int]], oldest: int) -> set[Place]:
    """Releases as the rule says it: every kept row is looked at."""
    last = {(group, member): attempt for group, member, attempt in sorted(samples)}
    released = [
        key for key, (attempt, _) in kept.items() if attempt <= last.get(key, attempt - 1) or 0 <= key[0] < oldest
    ]
    return {kept.pop(key)[1] for key in released}


def test_what_is_released_is_what_a_look_at_every_row_would_release() -> None:
    for seed in range(10):
        chance = random.Random(seed)
        retention = RowRetention()
        kept = Kept()
        oldest = 0
        for slot in range(200):
            group = chance.randint(-2, 12)
            member = chance.randint(-1, 2)
            attempt = chance.randint(0, 2)
            freed = retention.add((group, member, attempt), place(slot))
            before = kept.get((group, member))
            if before is not None and before[0] > attempt:
                assert freed == [place(slot)]
            else:
                assert freed == ([] if before is None else [before[1]])
                kept[group, member] = attempt, place(slot)
            if chance.random() < 0.2:
                oldest += chance.randint(0, 2)
                samples = [(chance.randint(-2, 12), chance.randint(-1, 2), chance.randint(0, 2)) for _ in range(4)]
                assert set(retention.release(samples, oldest)) == kept_by_scan(kept, samples, oldest)
                assert retention.attempts() == {key: each for key, (each, _) in kept.items()}


def test_a_row_that_is_stored_after_its_group_has_finished_goes_with_the_next_release() -> None:
    retention = RowRetention()
    assert retention.release([], 5) == []
    retention.add((3, 0, 0), place(1))
    assert retention.release([], 5) == [place(1)]


def test_a_release_costs_no_more_where_more_rows_are_kept() -> None:
    few = _instructions(100)
    many = _instructions(10_000)
    assert many <= 1.1 * few


def _instructions(groups: int) -> int:
    retention = RowRetention()
    for group in range(groups):
        retention.add((group, 0, 0), place(group))
    retention.release([], 1)
    with counting() as count:
        for group in range(1, 50):
            retention.release([(group, 0, 0)], group)
    return count.instructions
