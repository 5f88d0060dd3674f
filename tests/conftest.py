"""Every test leaves nothing behind: no pending asyncio task, no child process, no shared memory."""

import asyncio
import gc
import inspect
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest

pytest_plugins = ["tests.golden"]

hypothesis.settings.register_profile("without a clock", deadline=None)
hypothesis.settings.load_profile("without a clock")

# Before anything imports torch: sums over more threads differ in their last bits, and some tests compare bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARED_MEMORY = Path("/dev/shm")
MADE_HERE: set[str] = set()
"""Names of the segments that this process has made."""

BEFORE = pytest.StashKey[set[Path]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The word of a trap can be asked for with -k."""
    for item in items:
        item.extra_keyword_matches.update(mark.args[0] for mark in item.iter_markers("trap"))


def pytest_collection_finish() -> None:
    """Modules that are imported now stay; a collector that passes over torch takes a twentieth less of all time. One
    that begins after 100,000 new objects instead of 700 takes a further tenth less of a simulation."""
    _note_names()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


def pytest_sessionstart(session: pytest.Session) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # A shell starts what it runs in the background like this.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # So does nohup.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    session.stash[BEFORE] = _segments()


def pytest_sessionfinish(session: pytest.Session) -> None:
    folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    if left := own_segments(_segments() - session.stash[BEFORE], folder):
        raise pytest.UsageError(f"shared memory left behind: {sorted(path.name for path in left)}")


@pytest.fixture(scope="session")
def unknown_metrics() -> Callable[[Mapping[str, object]], list[str]]:
    """Returns a function that names the metrics which no entry of METRICS or FURTHER_METRICS matches."""
    from asyncrl.telemetry.jsonl import FURTHER_METRICS, METRICS

    further = re.compile("|".join(re.sub(r"<\w+>", "[^/]+(/[^/]+)?", name) for name in FURTHER_METRICS))
    return lambda metrics: [name for name in metrics if name not in METRICS and not further.fullmatch(name)]


@pytest.fixture(scope="session")
def bubblewrap_works() -> None:
    """Skips where bubblewrap is missing; scripts/set-up installs it."""
    from asyncrl.children.sandbox import SandboxError
    from asyncrl.children.sandbox.bubblewrap import try_sandbox

    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed; scripts/set-up installs it as root: apt-get install bubblewrap")
    try:
        try_sandbox()
    except SandboxError as error:
        pytest.skip(str(error))


def _children() -> set[int]:
    """But multiprocessing's resource tracker, which Python keeps to its end, and warm sandboxes."""
    threads = Path("/proc/self/task").iterdir()
    pids = {int(pid) for thread in threads for pid in _read(thread / "children").split()}
    return {pid for pid in pids if "resource_tracker" not in _read(Path(f"/proc/{pid}/cmdline"))} - _warm()


def _warm() -> set[int]:
    """The sandboxes in which packages read answers, which templates keep."""
    module = sys.modules.get("asyncrl.children.sandbox.package_calls")
    return {sandbox.process for sandbox in module.OPEN} if module is not None else set()


def _read(path: Path) -> str:
    """Empty when the thread or process has ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _segments() -> set[Path]:
    return set(SHARED_MEMORY.glob("asyncrl-*"))


def own_segments(segments: set[Path], folder: Path) -> set[Path]:
    """Returns the segments that were made here: by this process, or by a fleet whose run directory is below a folder. A
    run begins the names of its segments with its id. Others on this machine make and leave theirs as they like."""
    if not segments:
        return set()
    starts = tuple(f"asyncrl-{path.read_text().strip()}" for path in folder.rglob("run.id") if path.stat().st_size)
    return {path for path in segments if path.name in MADE_HERE or path.name.startswith(starts)}


def _note_names() -> None:
    """Has this process note the names of the segments that it makes."""
    if (module := sys.modules.get("asyncrl.lanes.shared_memory")) is None:
        return
    make = module.Segment.create.__func__

    def create(cls: type, name: str, *arguments: Any, **options: Any) -> Any:
        MADE_HERE.add(name)
        return make(cls, name, *arguments, **options)

    module.Segment.create = classmethod(create)


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    children = _children()
    segments = _segments()
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_no_task_left_behind")
    yield
    left = own_segments(_segments() - segments, tmp_path_factory.getbasetemp())
    assert not left, f"shared memory left behind: {sorted(path.name for path in left)}"
    behind = {
        pid: (_read(Path(f"/proc/{pid}/stat")), _read(Path(f"/proc/{pid}/cmdline"))) for pid in _children() - children
    }
    assert not behind, f"child processes left behind, each with its stat and command: {behind}"


@pytest.fixture
async def _no_task_left_behind() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    left = [task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not task.done()]
    assert not left, f"tasks left behind: {[task.get_name() for task in left]}"
