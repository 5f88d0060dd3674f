"""Calls that are recorded wait for a disk that cannot follow, so that no more than a bound is in memory."""

import asyncio
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import WireError
from asyncrl.lanes.data import recorder
from asyncrl.lanes.data.recorder import LaneRecorder, RecordFiles, is_whole, read_records, recorded_instances
from asyncrl.protocols.messages import Call


async def test_a_call_is_answered_once_the_disk_has_room_for_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()
    monkeypatch.setattr(recorder, "MOST_WAITING", 10)
    monkeypatch.setattr(RecordFiles, "_write", lambda self, data: written.wait(20))
    answered = asyncio.Event()

    async def answer() -> str:
        answered.set()
        return "answer"

    async def digests() -> dict[str, Any]:
        return {}

    with closing(RecordFiles(tmp_path, "reward0.0-0-a", 1000, ("worker", "{}"))) as files:
        recorded = LaneRecorder(files).around(lambda call: answer(), ["score"], digests)
        calling = asyncio.ensure_future(recorded(Call(0, "score", (), 5.0)))
        await answered.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not calling.done(), "its records wait for the disk"
        written.set()
        assert await calling == "answer"
        assert files.failure == ""


# Files of records: what comes back, the bound on their bytes, files that end in a record, and a disk that refuses.


FIRST = ("worker", "{}")


def numbers(folder: Path, instance: str = "training0.0-0-a") -> list[int]:
    return [record[1] for record in read_records(folder, instance) if record != FIRST]


def recorded(folder: Path, count: int, most_bytes: int = 1 << 20, instance: str = "training0.0-0-a") -> list[int]:
    """Writes records with their numbers; returns the numbers that are read again."""

    async def write() -> None:
        with closing(RecordFiles(folder, instance, most_bytes, FIRST)) as files:
            for number in range(count):
                files.append(("call", number, "step", [np.arange(100, dtype=np.int64) + number]))
                await files.drained(5.0)

    asyncio.run(write())
    return numbers(folder, instance)


def test_records_come_back_in_order_with_their_arrays(tmp_path: Path) -> None:
    assert recorded(tmp_path, 5) == list(range(5))
    last = list(read_records(tmp_path, "training0.0-0-a"))[-1]
    assert np.array_equal(last[3][0], np.arange(100) + 4)
    assert recorded_instances(tmp_path) == ["training0.0-0-a"]


def test_the_oldest_records_go_when_the_bound_is_reached(tmp_path: Path) -> None:
    most = 40_000
    kept = recorded(tmp_path, 200, most)
    assert kept == list(range(kept[0], 200))
    assert 0 < kept[0] < 190
    assert most / 2 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= most


def test_each_file_says_whose_records_it_has(tmp_path: Path) -> None:
    recorded(tmp_path, 200, 40_000)
    assert next(read_records(tmp_path, "training0.0-0-a")) == FIRST
    assert not is_whole(tmp_path, "training0.0-0-a")


def test_instances_of_one_worker_share_the_bound(tmp_path: Path) -> None:
    for number in range(12):
        recorded(tmp_path, 20, 40_000, f"reward0.0-{number}-a")
    recorded(tmp_path, 1, 40_000, "reward1.0-0-a")
    assert sum(path.stat().st_size for path in tmp_path.glob("reward0.*")) <= 40_000
    assert numbers(tmp_path, "reward0.0-11-a") == list(range(20))
    assert numbers(tmp_path, "reward0.0-0-a") == []


@pytest.mark.parametrize("cut", [1, 10, 500])
def test_a_file_that_ends_in_a_record_has_those_before_it(tmp_path: Path, cut: int) -> None:
    recorded(tmp_path, 3)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    assert numbers(tmp_path) == [0, 1]


def test_what_is_no_file_of_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "training0.0-0-a.0000").write_bytes(b"\xff" * 100)
    with pytest.raises(WireError, match="no file of records"):
        list(read_records(tmp_path, "training0.0-0-a"))


async def test_a_disk_that_refuses_ends_the_recording_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RecordFiles, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordFiles, "_write", full)
    monkeypatch.setattr(recorder, "MOST_WAITING", 10)
    with closing(RecordFiles(tmp_path, "reward0.0-0-a", 1000, FIRST)) as files:
        files.append(("call", 0, "score", []))
        await files.drained(5.0)
        assert "No space left" in files.failure
        files.append(("call", 1, "score", []))
    assert list(read_records(tmp_path, "reward0.0-0-a")) == [FIRST]


async def test_a_disk_that_takes_nothing_is_not_waited_for_longer_than_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST_WAITING", 10)
    released = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(self: RecordFiles, data: bytes) -> None:
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result(10)

    monkeypatch.setattr(RecordFiles, "_write", slow)
    files = RecordFiles(tmp_path, "reward0.0-0-a", 1000, FIRST)
    files.append(("call", 0, "score", []))
    await files.drained(0.01)
    assert files.failure == "the disk took no record within 0.01 s"
    released.set()
    await asyncio.to_thread(files.close)
