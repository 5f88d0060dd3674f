"""A run directory that is new, and one that is as it was when the run was refused."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from asyncrl.deploy import cli
from asyncrl.errors import AsyncrlError, ConfigError, TaskError
from asyncrl.telemetry.run_directory import DirectoryRollback, new_run_directory, open_run_directory


def contents(path: Path) -> dict[str, str]:
    return {str(each.relative_to(path)): each.read_text() for each in path.rglob("*") if each.is_file()}


def failing_run(path: Path, error: Exception, *, begun: bool = False) -> None:
    """Leaves in its directory what a run makes before anything is trained, and fails."""
    before = DirectoryRollback(path)
    with before.again_when_refused():
        directory = open_run_directory(path)
        directory.run_id()
        directory.config.write_text("new")
        directory.checkpoints.mkdir(exist_ok=True)
        before.begun = begun
        raise error


def test_two_runs_of_the_same_second_get_two_directories(tmp_path: Path) -> None:
    with (
        new_run_directory(tmp_path / "runs", "a-1200") as first,
        new_run_directory(tmp_path / "runs", "a-1200") as second,
        new_run_directory(tmp_path / "runs", "a-1200") as third,
    ):
        assert [path.name for path in (first, second, third)] == ["a-1200", "a-1200-2", "a-1200-3"]
        (second / "journal").write_text("trained")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a-1200-2"]


def test_a_path_is_shown_without_what_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere" / "deep"
    here = tmp_path / "here"
    elsewhere.mkdir(parents=True)
    here.mkdir()
    (here / "link").symlink_to(elsewhere)
    monkeypatch.chdir(here)
    assert open_run_directory(Path("../r")).path == tmp_path / "r"
    assert open_run_directory(Path("link/../r")).path == tmp_path / "elsewhere" / "r"  # As the kernel reads it.
    assert open_run_directory(Path("link/r")).path == here / "link" / "r"


def test_a_new_directory_that_stays_empty_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), new_run_directory(tmp_path / "runs", "a"):
        raise ConfigError("a mistake")
    assert list(tmp_path.iterdir()) == []


def test_a_place_for_no_directory_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match="name another with --run-dir"), new_run_directory(tmp_path / "runs", "a"):
        pass


@pytest.mark.parametrize("mistake", [ConfigError("bad"), TaskError("bad")])
def test_a_refused_run_leaves_no_new_directory(mistake: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(mistake)):
        failing_run(tmp_path / "new" / "deep", mistake)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_leaves_an_existing_directory_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("config.toml", "journal", "mine.txt"):
        (tmp_path / name).write_text("old")
    was = contents(tmp_path)
    with pytest.raises(ConfigError):
        failing_run(tmp_path, ConfigError("bad"))
    assert contents(tmp_path) == was


@pytest.mark.parametrize("kept", [".", "run.lock", "journal", "checkpoints"])
def test_a_run_that_cannot_be_written_is_refused_before_it_is_touched(
    kept: str, readable_folder: Path, only_reading: Callable[..., AbstractContextManager[None]]
) -> None:
    (readable_folder / "logs").mkdir()
    (readable_folder / "checkpoints").mkdir()
    for name in ("config.toml", "journal", "run.id", "run.lock"):
        (readable_folder / name).write_text("old")
    open_run_directory(readable_folder)
    was = contents(readable_folder)
    says = rf"^{readable_folder / kept} cannot be written: .* --run-dir"
    with only_reading(readable_folder, kept), pytest.raises(ConfigError, match=says) as refused:
        open_run_directory(readable_folder)
    assert "\n" not in str(refused.value)
    assert contents(readable_folder) == was


def test_what_fails_later_or_otherwise_stays(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        failing_run(tmp_path / "begun", ConfigError("bad"), begun=True)
    with pytest.raises(AsyncrlError):
        failing_run(tmp_path / "fault", AsyncrlError("ours"))
    assert contents(tmp_path / "begun").keys() == contents(tmp_path / "fault").keys() != set()


@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://bucket/runs/a", "https://host/run"])
def test_an_address_is_no_run_directory(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"^{address} is an address, and a run directory is a folder"):
        open_run_directory(Path(address))
    assert not list(tmp_path.iterdir()), "no folder is made by that name"


@pytest.mark.parametrize("command", [["run", "quickstart"], ["run"]])
def test_a_run_at_an_address_is_refused_before_anything_is_made(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command, "--run-dir", "gs://bucket/run"]) == 2
    assert not list(tmp_path.iterdir())


def test_folders_with_a_colon_are_run_directories(tmp_path: Path) -> None:
    assert open_run_directory(tmp_path / "at 12:30" / "run").path.is_dir()
