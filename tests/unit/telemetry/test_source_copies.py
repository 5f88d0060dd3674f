"""A run keeps what it read, and knows when it is not the same any more."""

from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.telemetry.source_copies import (
    INDEX,
    LARGEST_COPY,
    changed,
    damaged_copies,
    keep,
    kept,
    look_at,
    moved,
)


@pytest.fixture
def reward(tmp_path: Path) -> tuple[str, Path]:
    path = tmp_path / "reward.py"
    path.write_text("def right(sample): return 1.0\n")
    return ("reward.functions", path)


def test_small_files_are_copied_and_large_ones_have_a_digest(tmp_path: Path, reward: tuple[str, Path]) -> None:
    large = tmp_path / "p.jsonl"
    large.write_bytes(b"x" * (LARGEST_COPY + 1))
    folder = tmp_path / "sources"
    keep(folder, look_at([reward, ("task.prompts", large)]))
    small, big = kept(folder)
    assert (folder / small.copy).read_bytes() == reward[1].read_bytes()
    assert (big.copy, big.bytes, len(big.digest)) == ("", LARGEST_COPY + 1, 64)
    assert damaged_copies(folder) == []


def test_a_change_is_told_with_the_copy_of_what_it_was(tmp_path: Path, reward: tuple[str, Path]) -> None:
    folder = tmp_path / "sources"
    keep(folder, look_at([reward]))
    assert changed(kept(folder), look_at([reward]), folder) == []
    reward[1].write_text("def right(sample): return 2.0\n")
    (change,) = changed(kept(folder), look_at([reward]), folder)
    old = kept(folder)[0].copy
    assert str(change).startswith(f"reward.functions: {reward[1]} has changed (SHA-256 {old[:8]} -> ")
    assert str(change).endswith(f"; {folder / old} is what it was")
    reward[1].unlink()
    assert "reward.py is gone; " in str(changed(kept(folder), look_at([reward]), folder)[0])


def test_a_file_that_is_read_now_or_no_more_is_a_change(tmp_path: Path, reward: tuple[str, Path]) -> None:
    folder = tmp_path / "sources"
    helper = tmp_path / "helper.py"
    helper.touch()
    alone = look_at([reward])
    both = look_at([reward, (reward[0], helper)])
    keep(folder, both)
    (change,) = changed(kept(folder), alone, folder)
    assert str(change) == f"{reward[0]}: {helper} is read no more; {folder / both[1].copy} is what it was"
    (change,) = changed(alone, both, folder)
    assert str(change) == f"{reward[0]}: {helper} is read now, and was not kept at the last start"
    assert changed([], both, folder) == [], "a run of an older version kept nothing"


def test_files_that_moved_hold_the_same(tmp_path: Path, reward: tuple[str, Path]) -> None:
    old = look_at([reward])
    elsewhere = reward[1].rename(tmp_path / "elsewhere.py")
    assert moved(old, look_at([("reward.functions", elsewhere)])) == {"reward.functions"}
    assert changed(old, look_at([("reward.functions", elsewhere)]), tmp_path) == []
    elsewhere.write_text("other")
    assert moved(old, look_at([("reward.functions", elsewhere)])) == set()
    assert moved(old, look_at([reward])) == set(), "a file that is gone is not the same"


def test_a_damaged_copy_is_found_and_a_damaged_index_is_an_error(tmp_path: Path, reward: tuple[str, Path]) -> None:
    folder = tmp_path / "sources"
    keep(folder, look_at([reward]))
    (folder / kept(folder)[0].copy).write_text("other")
    (damage,) = damaged_copies(folder)
    assert damage.endswith(f"is not the {reward[1]} that the run read for reward.functions")
    (folder / INDEX).write_text("[")
    with pytest.raises(ConfigError, match=r"index\.json is damaged \(.*remove it to go on"):
        kept(folder)


def test_a_folder_that_is_gone_is_damage(tmp_path: Path) -> None:
    assert kept(tmp_path / "sources") == []
    (damage,) = damaged_copies(tmp_path / "sources")
    assert damage.startswith(f"{tmp_path / 'sources' / INDEX} is gone, ")
