"""Every test leaves nothing behind: no pending asyncio task, no child process, no shared memory."""

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")


def _children() -> set[int]:
    """But multiprocessing's resource tracker, which Python keeps to its end."""
    threads = Path("/proc/self/task").iterdir()
    pids = {int(pid) for thread in threads for pid in _read(thread / "children").split()}
    return {pid for pid in pids if "resource_tracker" not in _read(Path(f"/proc/{pid}/cmdline"))}


def _read(path: Path) -> str:
    """Empty when the thread or process has ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _segments() -> set[Path]:
    return set(SHARED_MEMORY.glob("asyncrl-*"))


def _of_another_run(path: Path) -> bool:
    """Whether a process that is not ours has it mapped: another test run on the same machine."""
    mine = {os.getpid(), *_children()}
    others = (p for p in Path("/proc").iterdir() if p.name.isdigit() and int(p.name) not in mine)
    return any(str(path) in _read(process / "maps") for process in others)


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    children, segments = _children(), _segments()
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_no_task_left_behind")
    yield
    left = {path for path in _segments() - segments if path.exists() and not _of_another_run(path)}
    for path in left:
        path.unlink(missing_ok=True)
    assert not left, f"shared memory left behind: {sorted(path.name for path in left)}"
    assert _children() <= children, f"child processes left behind: {_children() - children}"


@pytest.fixture
async def _no_task_left_behind() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    left = [task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not task.done()]
    assert not left, f"tasks left behind: {[task.get_name() for task in left]}"
