"""Workers that are forked: what they are forked from dies, hangs or is not fit for it. Real processes, stand-in
services. What must not depend on how workers are started is in test_supervision.py, for both ways."""

import asyncio
import os
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from asyncrl.concurrency import gather
from asyncrl.config.schema import Config, FleetConfig, ModelConfig, TaskConfig
from asyncrl.deploy.process.fork_client import ForkedWorker, Forks, forks_of, worker_environment
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.errors import FleetFailed
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.fleet.lifecycle_events import FleetEvent, WorkerStarted
from asyncrl.fleet.worker.worker_spec import Origin, RunFacts
from asyncrl.lanes.control.wire import Wakeup

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from standins import Echo, forks_without_torch  # noqa: E402
from watching import PATIENCE, dead, wait_until, workers_of  # noqa: E402

pytestmark = pytest.mark.fleet


@pytest.fixture(autouse=True)
def _standins_can_be_imported(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{tmp_path}", prepend=os.pathsep)


@asynccontextmanager
async def fleet_in(
    run_dir: Path, *modules: str, origin: Origin = "torch", deadline: float = 20.0
) -> AsyncIterator[tuple[RunningFleet, Forks, list[str]]]:
    """Two workers, what they were forked from, and what was said. modules: imported before."""
    said: list[str] = []
    config = Config(
        model=ModelConfig(name="none"), task=TaskConfig(prompts="none"), fleet=FleetConfig(start_deadline=deadline)
    )
    facts = RunFacts(secrets.token_hex(4), run_dir, run_dir, 0, "none", config)
    specs = [ServiceSpec("echo", Echo, "standins:EchoService", replicas=2, origin=origin)]
    with forks_without_torch(config, said.append, *modules) as forks:
        assert forks is not None
        with LocalLauncher(facts.run, forks=forks) as launcher:
            async with running_fleet(specs, facts, launcher=launcher, report=said.append) as running:
                yield running, forks, said


def pids_of(run_dir: Path) -> list[int]:
    return sorted(workers_of(run_dir).values())


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_spawned(pid: int) -> bool:
    return "worker_main" in command_of(pid)


def command_of(pid: int) -> str:
    """Returns the command line of a process that `ps -ef` shows."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()


def name_of(pid: int) -> str:
    """Returns the name of a process that `ps` and `top` show."""
    return Path(f"/proc/{pid}/comm").read_text()


async def replaced(running: RunningFleet, pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Kill a worker; returns once another one takes calls in its place."""
    back = Wakeup()

    def take(event: FleetEvent) -> None:
        if isinstance(event, WorkerStarted):
            back.wake()

    running.subscribers.append(take)
    waiting = asyncio.ensure_future(back.wait())
    os.kill(pid, how)
    await waiting
    running.subscribers.remove(take)


@pytest.mark.parametrize("origin", ["plain", "torch"])
async def test_forked_workers_are_children_of_the_controller(origin: Origin, tmp_path: Path) -> None:
    async with fleet_in(tmp_path, origin=origin) as (_, forks, said):
        for pid in pids_of(tmp_path):
            assert parent_of(pid) == os.getpid()
            assert name_of(pid).startswith("echo")
            assert command_of(pid) == f"asyncrl worker {name_of(pid).strip()}"
            assert os.getpgid(pid) == pid
        assert forks.pids[origin] not in pids_of(tmp_path)
        assert command_of(forks.pids[origin]) == f"asyncrl fork server ({origin}) of {os.getpid()}"
        assert said == []


async def test_a_service_that_cannot_be_forked_is_spawned(tmp_path: Path) -> None:
    async with fleet_in(tmp_path, origin="spawn") as (running, _, said), asyncio.timeout(PATIENCE):
        assert all(map(is_spawned, pids_of(tmp_path)))
        assert "hello" in await running.handle("echo", Echo).echo("hello")
        assert said == []


async def test_cause_of_death_of_a_forked_worker_is_reported(tmp_path: Path) -> None:
    async with fleet_in(tmp_path) as (running, _, said), asyncio.timeout(PATIENCE):
        await replaced(running, pids_of(tmp_path)[0], signal.SIGTERM)
        assert "killed by SIGTERM; it is started again" in said[0]


@pytest.mark.parametrize("victim", ["plain", "torch"])
async def test_workers_outlive_the_fork_server_and_the_next_worker_comes_from_a_new_one(
    victim: str, tmp_path: Path
) -> None:
    async with fleet_in(tmp_path) as (running, forks, said), asyncio.timeout(PATIENCE):
        await replaced(running, pids_of(tmp_path)[0])
        before = pids_of(tmp_path)
        gone = parent_of(forks.pids["torch"]) if victim == "plain" else forks.pids["torch"]
        os.kill(gone, signal.SIGKILL)
        wait_until(lambda: dead(gone), "its end", 5)
        assert sorted(await running.handle("echo", Echo).pids()) == before

        said.clear()
        await replaced(running, before[0])
        assert pids_of(tmp_path)[0] not in before or pids_of(tmp_path)[1] not in before
        assert not any(map(is_spawned, pids_of(tmp_path)))
        assert [line for line in said if "fork workers from (torch) has ended; another one is started" in line]


@pytest.mark.parametrize("when", ["while it imports", "later"])
async def test_stopped_fork_server_is_replaced_long_before_the_deadline(when: str, tmp_path: Path) -> None:
    async with fleet_in(tmp_path, deadline=1000.0) as (running, forks, said), asyncio.timeout(PATIENCE):
        stopped = forks.pids["torch"]
        if when != "later":
            forks.end()
            before = set(_pids(children_of(os.getpid())))
            forks.begin()
            (first,) = set(_pids(children_of(os.getpid()))) - before
            wait_until(lambda: len(_pids(children_of(first))) == 1, "the process with torch")
            (stopped,) = _pids(children_of(first))
        os.kill(stopped, signal.SIGSTOP)
        await replaced(running, pids_of(tmp_path)[0])
        assert [line for line in said if "(torch) is stopped (SIGSTOP); another one is started" in line]
        wait_until(lambda: dead(stopped), "its end", 5)


async def test_hung_fork_server_is_replaced_after_the_deadline(tmp_path: Path) -> None:
    hung = tmp_path / "hung"
    (tmp_path / "hangs.py").write_text(
        f"import time, pathlib\nif not pathlib.Path({str(hung)!r}).exists():\n"
        f"    pathlib.Path({str(hung)!r}).touch()\n    time.sleep(1000)\n"
    )
    async with asyncio.timeout(PATIENCE), fleet_in(tmp_path, "hangs", deadline=5.0) as (_, _, said):
        assert [line for line in said if "was silent for 5 s; another one is started" in line]
        assert not any(map(is_spawned, pids_of(tmp_path)))


UNFIT = {
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
        "2 threads",
    ),
    "socket": ("import socket\nopened = socket.socket()\n", "a socket open"),
}


@pytest.mark.parametrize("what", UNFIT)
async def test_no_worker_is_forked_from_a_process_with_threads_or_sockets(what: str, tmp_path: Path) -> None:
    code, why = UNFIT[what]
    (tmp_path / "unfit.py").write_text(code)
    async with fleet_in(tmp_path, "unfit") as (running, _, said), asyncio.timeout(PATIENCE):
        assert all(map(is_spawned, pids_of(tmp_path)))
        assert len(said) == 2
        assert all("is spawned instead of forked" in line and why in line for line in said)
        assert "hello" in await running.handle("echo", Echo).echo("hello")


async def test_failed_import_is_reported_and_workers_are_spawned(tmp_path: Path) -> None:
    async with fleet_in(tmp_path, "no_such_module") as (_, _, said):
        assert all(map(is_spawned, pids_of(tmp_path)))
        assert "its last words: ModuleNotFoundError: No module named 'no_such_module'" in said[0]


async def test_random_numbers_of_forked_workers_differ(tmp_path: Path) -> None:
    async with fleet_in(tmp_path, "numpy.random") as (running, _, _), asyncio.timeout(PATIENCE):
        one, other = await running.handle("echo", Echo).dice()
        assert one[0] != other[0]
        assert one[1] != other[1]


async def test_forked_worker_gets_the_present_limits_of_the_controller(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with fleet_in(tmp_path) as (running, _, _), asyncio.timeout(PATIENCE):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        try:
            before = pids_of(tmp_path)
            await replaced(running, before[0])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        (new,) = set(pids_of(tmp_path)) - set(before)
        assert resource.prlimit(new, resource.RLIMIT_NOFILE) == (soft - 1, hard)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_gets_the_niceness_of_the_controller(start: str, tmp_path: Path) -> None:
    program = [sys.executable, str(HERE / "fleet_parent.py"), secrets.token_hex(4), str(tmp_path), start]
    parent = subprocess.Popen(["nice", "-n", "3", *program], stderr=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "up").exists, "the fleet", 30)
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids_of(tmp_path)} == {min(mine + 3, 19)}
    finally:
        parent.send_signal(signal.SIGINT)
        parent.wait(20)


async def test_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
    """Also while a fork is under way."""
    started: list[int] = []

    async def run() -> None:
        async with fleet_in(tmp_path) as (_, forks, _):
            started.extend(forks.pids.values())

    for turns in range(0, 60, 6):
        task = asyncio.ensure_future(run())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError, FleetFailed):
            await task
    assert all(map(dead, started))


async def test_a_request_for_a_worker_that_is_cancelled_leaves_no_child(tmp_path: Path) -> None:
    children = children_of(os.getpid())
    with Forks(os.environ, ()) as forks, (tmp_path / "output").open("ab") as output:
        first = await forks.fork("plain", "first", output)
        request = asyncio.ensure_future(forks.fork("plain", "cancelled", output))
        before = len(_pids(children))
        for _ in range(3):
            await asyncio.sleep(0)
        wait_until(lambda: len(_pids(children)) > before, "the worker, whose pid was not read yet")
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        _end(first)


def test_runs_one_after_the_other_are_forked_from_the_same_processes(tmp_path: Path) -> None:
    """Each run has an event loop of its own, and starts several workers at once."""
    config = Config(model=ModelConfig(name="none"), task=TaskConfig(prompts="none"))
    with Forks(worker_environment(os.environ), ()) as begun, (tmp_path / "output").open("ab") as output:

        async def workers() -> None:
            with forks_of(config, begun) as forks:
                assert forks is begun
                for worker in await gather(*(forks.fork("plain", f"{number}", output) for number in range(3))):
                    _end(worker)

        asyncio.run(workers())
        pids = begun.pids
        asyncio.run(workers())
        assert begun.pids == pids


def children_of(pid: int) -> Path:
    return Path(f"/proc/{pid}/task/{pid}/children")


def _pids(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()]


def _end(worker: ForkedWorker) -> None:
    worker.kill()
    os.waitpid(worker.pid, 0)
    worker.stdin.close()
