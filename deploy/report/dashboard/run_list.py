"""Finds the runs that the dashboard shows: run directories, and folders of them."""

from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.telemetry.run_directory import RunDirectory

MAX_RUNS = 200
"""Runs of the list, those that were touched last."""


def find_runs(roots: Sequence[Path]) -> dict[str, Path]:
    """Returns run directories by the name that the page shows, newest first. A root that is no run is a folder of runs.
    Raises ConfigError when a root does not exist, or holds no run."""
    found: dict[Path, float] = {}
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"{root} is no folder: name a run directory, or a folder that holds some, such as runs")
        for path in [root] if _is_run(root) else [each for each in root.iterdir() if _is_run(each)]:
            found[path.absolute()] = _touched_at(path)
    if not found:
        named = ", ".join(map(str, roots))
        raise ConfigError(f"{named} holds no run yet: start one with `asyncrl run`, or name where its directory is")
    newest = sorted(found, key=lambda path: found[path], reverse=True)[:MAX_RUNS]
    return {_name(path, newest): path for path in newest}


def _is_run(path: Path) -> bool:
    return path.is_dir() and RunDirectory(path).started_before


def _touched_at(path: Path) -> float:
    status = RunDirectory(path).status
    return max(each.stat().st_mtime for each in (path, status) if each.exists())


def _name(path: Path, others: Sequence[Path]) -> str:
    """Returns the name of the folder; the whole path where two runs have the same."""
    return str(path) if sum(other.name == path.name for other in others) > 1 else path.name
