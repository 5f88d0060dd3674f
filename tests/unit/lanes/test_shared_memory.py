import errno
import os
import signal
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.deploy.checks.machine import shared_memory_check
from asyncrl.errors import ArenaFull
from asyncrl.lanes.shared_memory import (
    Segment,
    abandoned_segments,
    copy_in_two_threads,
    segment_name,
    unlink_abandoned,
    unlink_instance_segments,
    unlink_run_segments,
)


def test_what_one_maps_the_other_sees(tmp_path: Path) -> None:
    with closing(Segment.create("asyncrl-a-1-x.rows", 4096, tmp_path)) as made:
        np.frombuffer(made.buffer, np.int32, 3, 8)[:] = (1, 2, 3)
        with closing(Segment.open("asyncrl-a-1-x.rows", directory=tmp_path)) as seen:
            assert np.frombuffer(seen.buffer, np.int32, 3, 8).tolist() == [1, 2, 3]
            assert seen.size == 4096
            assert not np.frombuffer(seen.buffer, np.uint8, 1, 0).flags.writeable
            assert seen.buffer.readonly
            assert not made.buffer.readonly


def test_only_this_user_may_look(tmp_path: Path) -> None:
    with closing(Segment.create("asyncrl-a", 10, tmp_path)) as segment:
        assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    with closing(Segment.create("asyncrl-a", 10, tmp_path)), pytest.raises(FileExistsError):
        Segment.create("asyncrl-a", 10, tmp_path)


def test_too_little_memory_is_a_clear_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ArenaFull, match=r"no room for 1\.0 MB.*free.*--shm-size"):
        Segment.create("asyncrl-a", 2**20, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_more_than_there_is_is_refused_by_the_real_shared_memory() -> None:
    name = segment_name("feedbeef", 1, "x", "rows")
    with pytest.raises(ArenaFull):
        Segment.create(name, 2**50)
    assert not Path("/dev/shm", name).exists()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "a\0b", "-x"])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        Segment.open(name, directory=tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 100)
    (tmp_path / "asyncrl-a").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic"):
        Segment.open("asyncrl-a", directory=tmp_path)


def test_closing_is_harmless_while_somebody_still_looks(tmp_path: Path) -> None:
    segment = Segment.create("asyncrl-a", 16, tmp_path)
    view = np.frombuffer(segment.buffer, np.uint8, 16, 0)
    segment.close()
    segment.close()
    assert view.sum() == 0


def test_an_unlinked_segment_says_so(tmp_path: Path) -> None:
    with (
        closing(Segment.create("asyncrl-a", 16, tmp_path)) as made,
        closing(Segment.open("asyncrl-a", directory=tmp_path)) as seen,
    ):
        assert not seen.unlinked
        made.unlink()
        assert seen.unlinked


def test_a_sweep_takes_what_one_start_left_and_nothing_else(tmp_path: Path) -> None:
    names = [
        segment_name(start, incarnation, "w0.0-1-ab", "rows") for start in ("aa", "aab") for incarnation in (1, 10)
    ]
    for name in names:
        (tmp_path / name).touch()
    assert unlink_run_segments("aa", tmp_path) == names[:2]
    assert sorted(path.name for path in tmp_path.iterdir()) == names[2:]


def test_a_dead_worker_leaves_nothing(tmp_path: Path) -> None:
    for instance in ("w0.0-1-ab", "w0.0-1-abc"):
        for kind in ("rows", "weights"):
            (tmp_path / segment_name("aa", 1, instance, kind)).touch()
    assert len(unlink_instance_segments("aa", 1, "w0.0-1-ab", tmp_path)) == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_copy_in_two_threads_threads_is_whole() -> None:
    source = np.arange(100_001, dtype=np.int32)
    target = np.zeros_like(source)
    copy_in_two_threads(target, source)
    assert np.array_equal(target, source)


def made_and_left(folder: Path, name: str, *, mapped: bool = False) -> Segment | None:
    """Has another process make a segment and be killed; returns it mapped here, if that is asked for."""
    if (child := os.fork()) == 0:
        Segment.create(name, 8192, folder)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    segment = Segment.open(name, directory=folder) if mapped else None
    os.utime(folder / name, (1.0, 1.0))
    return segment


def test_what_a_killed_run_left_is_found_and_removed_and_nothing_else(tmp_path: Path) -> None:
    made_and_left(tmp_path, "asyncrl-left-0-a.rows")
    seen = made_and_left(tmp_path, "asyncrl-seen-0-a.rows", mapped=True)
    made_and_left(tmp_path, "asyncrl-young-0-a.rows")
    os.utime(tmp_path / "asyncrl-young-0-a.rows")
    living = Segment.create("asyncrl-living-0-a.rows", 8192, tmp_path)
    os.utime(tmp_path / "asyncrl-living-0-a.rows", (1.0, 1.0))
    (tmp_path / "of-others").write_bytes(bytes(8192))
    assert abandoned_segments(tmp_path) == {tmp_path / "asyncrl-left-0-a.rows": 8192}
    assert shared_memory_check(tmp_path).status == "note"
    assert unlink_abandoned(tmp_path) == 8192
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("asyncrl-living-0-a.rows", "asyncrl-seen-0-a.rows", "asyncrl-young-0-a.rows", "of-others"),
    ]
    assert shared_memory_check(tmp_path).status == "ok"
    assert seen is not None
    living.close()
    assert abandoned_segments(tmp_path) == {tmp_path / "asyncrl-living-0-a.rows": 8192}, (
        "it was closed and not unlinked"
    )
