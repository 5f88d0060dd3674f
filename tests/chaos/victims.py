"""Finds the processes of a fleet on network hosts, which know each other by process ids that differ from ours."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def from_outside(first_process: int, inside: set[int]) -> list[int]:
    """Returns our process ids of those that have the ids `inside` on a host. first_process: of the host."""
    with suppress(OSError):
        namespace = os.readlink(f"/proc/{first_process}/ns/pid")
        return sorted(ours for ours, theirs in _members(namespace) if theirs in inside)
    return []


def _members(namespace: str) -> Iterator[tuple[int, int]]:
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and os.readlink(process / "ns" / "pid") == namespace:
                status = (process / "status").read_text()
                yield int(process.name), int(status.partition("NSpid:")[2].splitlines()[0].split()[-1])


def parent_of(pid: int) -> int | None:
    """Returns None for a process that has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def children_of(pid: int) -> list[int]:
    """Returns none for a process that has ended."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def has_argument(pid: int, argument: str) -> bool:
    """Returns whether a process was started with this argument; False for one that has ended."""
    with suppress(OSError):
        return argument in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return False
