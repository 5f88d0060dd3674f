"""Launchers: workers that share a process, and what an earlier start of a run left behind."""

import asyncio
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.concurrency import gather
from asyncrl.config.schema import Config
from asyncrl.deploy.process.local_launcher import SWEEP
from asyncrl.fleet.launching.launcher import InprocLauncher, InprocWorker, SharedProcesses, new_start, remove_leftovers
from asyncrl.fleet.worker.worker_spec import NOT_BOUND, RunFacts, WorkerSpec
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.lanes.shared_memory import Segment
from asyncrl.protocols.rank_layout import Layout
from asyncrl.telemetry.run_directory import RunDirectory


class OneTaskLauncher(InprocLauncher):
    """Starts a task that waits in place of a worker, and notes what it was asked for."""

    def __init__(self) -> None:
        super().__init__(InprocWire(), InprocWire())
        self.spawned: list[WorkerSpec] = []

    async def spawn(self, spec: WorkerSpec) -> InprocWorker:
        self.spawned.append(spec)
        return InprocWorker(spec, lambda stop: _until(stop), lambda: None)


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


@pytest.fixture
def spec(tmp_path: Path) -> Callable[[str, int, int], WorkerSpec]:
    config = Config.model_validate({"model": {"name": "tiny"}, "task": {"prompts": "none"}})
    facts = RunFacts("00", tmp_path, tmp_path, 0, "arena", config)

    def make(service: str, replica: int, rank: int) -> WorkerSpec:
        instance = f"{service}{replica}.{rank}-0-0"
        return WorkerSpec(service, replica, rank, Layout(), instance, "module:Class", NOT_BOUND, facts)

    return make


async def test_a_guest_starts_and_ends_with_its_host(spec: Callable[[str, int, int], WorkerSpec]) -> None:
    launcher = OneTaskLauncher()
    shared = SharedProcesses({"generation": ("training", ())})
    ranks = [shared.launcher_of("training", 0, rank, launcher) for rank in (0, 1)]
    guests = [shared.launcher_of("generation", replica, 0, launcher) for replica in (0, 1)]
    assert shared.launcher_of("reward", 0, 0, launcher) is launcher
    started = await gather(
        guests[0].spawn(spec("generation", 0, 0)),
        ranks[1].spawn(spec("training", 0, 1)),
        ranks[0].spawn(spec("training", 0, 0)),
        guests[1].spawn(spec("generation", 1, 0)),
    )
    guest, last, first, other = started
    together = {each.instance: each.guest.instance for each in launcher.spawned if each.guest is not None}
    assert together == {
        "training0.0-0-0": "generation0.0-0-0",
        "training0.1-0-0": "generation1.0-0-0",
    }
    assert [guest.spec.service, other.spec.replica, guest.labels] == ["generation", 1, first.labels]
    guest.kill()
    async with asyncio.timeout(60):
        assert await guest.wait() == await first.wait() == "was killed"
    last.stop()
    async with asyncio.timeout(60):
        assert await other.wait() == "ended"


async def test_a_guest_is_in_the_rank_that_its_service_says(spec: Callable[[str, int, int], WorkerSpec]) -> None:
    launcher = OneTaskLauncher()
    shared = SharedProcesses({"generation": ("training", [[0, 2], [1, 3]])})
    ranks = [shared.launcher_of("training", 0, rank, launcher) for rank in range(4)]
    places = [(replica, rank) for replica in (0, 1) for rank in (0, 1)]
    guests = [shared.launcher_of("generation", *place, launcher).spawn(spec("generation", *place)) for place in places]
    started = await gather(*guests, *(each.spawn(spec("training", 0, rank)) for rank, each in enumerate(ranks)))
    together = {each.rank: (each.guest.replica, each.guest.rank) for each in launcher.spawned if each.guest is not None}
    assert together == {0: (0, 0), 2: (0, 1), 1: (1, 0), 3: (1, 1)}
    async with asyncio.timeout(60):
        for each in started[-4:]:
            each.stop()
            await each.wait()


# ---- what one start of a run leaves outside its directory, and who may remove it -----------------------------------


SHARED_MEMORY = Path("/dev/shm")


class Starts:
    """Starts that are killed at once, and all that they leave."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def at(self, path: Path) -> list[Path]:
        """The next start there; what lies outside then, as after a `kill -9` of all its processes."""
        name = new_start(RunDirectory(path))
        self.names.append(name)
        Segment.create(f"asyncrl-{name}-0-weights", 64).close()
        return [SHARED_MEMORY / f"asyncrl-{name}-0-weights", Path(tempfile.mkdtemp(prefix=f"asyncrl-{name}-"))]


def left(paths: list[Path]) -> list[bool]:
    return [path.exists() for path in paths]


@pytest.fixture
def starts() -> Iterator[Starts]:
    starts = Starts()
    yield starts
    for name in starts.names:
        remove_leftovers(name)


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "original"
    path.mkdir()
    return path


def test_what_a_killed_start_left_is_gone_at_the_next(starts: Starts, original: Path) -> None:
    first = starts.at(original)
    assert left(first) == [True, True]
    second = starts.at(original)
    assert left(first + second) == [False, False, True, True]
    assert len({*starts.names}) == 2
    assert {(name[:8], len(name)) for name in starts.names} == {((original / "run.id").read_text(), 16)}


def test_a_copy_leaves_the_run_alone_that_it_is_a_copy_of(starts: Starts, original: Path, tmp_path: Path) -> None:
    running = starts.at(original)
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)
    copied = starts.at(copy)
    assert left(running) == [True, True]
    starts.at(copy)
    assert left(running + copied) == [True, True, False, False]


def test_a_moved_run_cleans_up_after_itself(starts: Starts, original: Path, tmp_path: Path) -> None:
    before = starts.at(original)
    original.rename(tmp_path / "moved")
    starts.at(tmp_path / "moved")
    assert left(before) == [False, False]


@pytest.mark.parametrize("text", ["", "torn", "* 1 2\n"])
def test_a_mark_that_is_damaged_removes_nothing(text: str, starts: Starts, original: Path) -> None:
    before = starts.at(original)
    (original / "run.start").write_text(text)
    assert left(before + starts.at(original)) == [True] * 4


def test_a_sweeper_that_comes_late_takes_nothing_of_the_start_that_followed(starts: Starts, original: Path) -> None:
    killed = starts.at(original)
    command = ["/bin/sh", "-c", SWEEP, starts.names[0], str(killed[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as late:
        assert late.stdin is not None
        late.send_signal(signal.SIGSTOP)
        late.stdin.close()  # as when its controller is killed
        resumed = starts.at(original)
        again = [SHARED_MEMORY / killed[0].name, killed[1]]  # what it will find, to see that it has been at work
        again[0].touch()
        again[1].mkdir()
        late.send_signal(signal.SIGCONT)
        assert late.wait(20) == 0
    assert left(resumed + again) == [True, True, False, False]


@pytest.mark.parametrize("shared", [True, False])
def test_files_of_weights_of_a_killed_start_are_gone_at_the_next(shared: bool, original: Path, tmp_path: Path) -> None:
    """Files of others in the same folder stay, and the next start may name another folder."""
    place = tmp_path / "shared" if shared else original / "weights"
    value = str(place) if shared else ""
    killed = new_start(RunDirectory(original), value)
    (place / killed).mkdir(parents=True)
    (place / killed / "weights-0-1.safetensors").touch()
    other = place / ("0" * 16)
    other.mkdir()
    new_start(RunDirectory(original))
    assert [*place.iterdir()] == [other]


def test_a_copy_leaves_the_files_of_weights_of_a_run_alone(original: Path, tmp_path: Path) -> None:
    running = new_start(RunDirectory(original), str(tmp_path / "shared"))
    (tmp_path / "shared" / running).mkdir(parents=True)
    shutil.copytree(original, tmp_path / "copy")
    new_start(RunDirectory(tmp_path / "copy"), str(tmp_path / "shared"))
    assert (tmp_path / "shared" / running).is_dir()
