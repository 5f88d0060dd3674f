"""The state of a run in a file, and what lies between two reports of a worker."""

import mmap
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.fleet.worker.process_memory import resident_bytes
from asyncrl.protocols.messages import Health
from asyncrl.telemetry.run_status import (
    RunStatus,
    WorkerStatus,
    cores_between,
    rates_between,
    read_status,
    shares_between,
    write_status,
)

COUNTED = {"tokens": 40.0, "running": 3.0}
EARLIER = Health("generation", 0, 0, "a", (), 0, {"busy": 3.0, "starved": 1.0}, 4.0, COUNTED, cpu=2.0)
LATER = replace(EARLIER, seconds={"busy": 4.0, "starved": 4.0}, wall=8.0, counters={"tokens": 240.0}, cpu=3.0)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    worker = WorkerStatus("generation0[0]", "a", "", ("generate for 1.0 s",), 3, {"busy": 0.5}, 0.9, 10**9, 2, {})
    status = RunStatus(1.5, 7, 25, {"running": 4}, (worker,))
    path = tmp_path / "status.json"
    assert read_status(path) is None
    write_status(path, status)
    assert read_status(path) == status
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '{"a": 1}', '{"workers": [{}]}', '{"workers": [3]}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "status.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"status.json is damaged .*; a run that goes on replaces it"):
        read_status(path)
    assert read_status(path / "no folder") is None


@pytest.mark.parametrize(
    ("before", "shares", "cores", "tokens"),
    [
        (EARLIER, {"busy": 0.25, "starved": 0.75}, 0.25, 50.0),
        (None, {"busy": 0.5, "starved": 0.5}, 3 / 8, 30.0),
        (replace(EARLIER, instance="killed meanwhile"), {"busy": 0.5, "starved": 0.5}, 3 / 8, 30.0),
        (LATER, {"busy": 0.5, "starved": 0.5}, 3 / 8, 30.0),
        (replace(EARLIER, counters={}), {"busy": 0.25, "starved": 0.75}, 0.25, 60.0),
    ],
)
def test_shares_are_of_the_time_between_two_reports(
    before: Health | None, shares: dict[str, float], cores: float, tokens: float
) -> None:
    assert shares_between(before, LATER) == shares
    assert cores_between(before, LATER) == cores
    assert rates_between(before, LATER) == {"tokens": tokens}


def test_a_worker_that_just_began_has_no_shares() -> None:
    begun = replace(EARLIER, wall=0.0, seconds={"busy": 0.0})
    assert (shares_between(None, begun), cores_between(None, begun), rates_between(None, begun)) == ({}, 0.0, {})


def test_memory_grows_with_what_a_process_holds() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 64 * 2**20) as held:
        held.write(bytes(len(held)))
        assert resident_bytes() - before > len(held) // 2
