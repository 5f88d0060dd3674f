"""Processes as /proc tells them: the tree below one, and whether one still runs."""

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Returns the process ids of its children and of theirs; one that ends meanwhile has none."""
    children: set[int] = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children.update(map(int, (thread / "children").read_text().split()))
    return children.union(*map(descendants, children))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pids: Iterable[int]) -> None:
    """Waits until these processes have ended."""
    async with asyncio.timeout(60):
        while any(map(alive, pids)):
            await asyncio.to_thread(os.sched_yield)
