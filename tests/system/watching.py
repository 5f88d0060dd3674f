"""Processes of a run, looked at from outside."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl.telemetry.jsonl import read_lines

PATIENCE = 300.0
"""Seconds after which a test takes a run for hung. A machine of CI was three times slower than a usual one."""


def wait_until(true: Callable[[], bool], what: str | Callable[[], str], seconds: float = PATIENCE) -> None:
    """what: that is waited for, in the words of the failure."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what if isinstance(what, str) else what()}"
        time.sleep(0.01)  # Nothing tells this process of what it waits for.


def dead(pid: int) -> bool:
    """Ended; perhaps not buried yet."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def workers_of(run_dir: Path) -> dict[tuple[str, int, int], int]:
    """(service, replica, rank) -> pid, as fleet.jsonl says; none before there is one."""
    workers: dict[str, dict[str, Any]] = {}
    for line in read_lines(run_dir / "fleet.jsonl"):
        if "ended" in line:
            del workers[line["ended"]]
        else:
            workers[line["instance"]] = line
    return {(worker["service"], worker["replica"], worker["rank"]): worker["pid"] for worker in workers.values()}


def pid_of(run_dir: Path, service: str, rank: int = 0) -> int:
    """Of a service's first replica."""
    return workers_of(run_dir)[service, 0, rank]


def checkpoints_of(run_dir: Path) -> list[int]:
    """Returns the versions of the checkpoints that are committed."""
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal())
