import asyncio
import os
import secrets
import signal
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from asyncrl.config.schema import Config, FleetConfig, ModelConfig, TaskConfig
from asyncrl.deploy.process.fork_client import Forks, worker_environment
from asyncrl.deploy.process.local_launcher import LocalLauncher, LocalWorker
from asyncrl.fleet.worker.worker_spec import RunFacts, WorkerSpec
from asyncrl.lanes.shared_memory import Segment
from asyncrl.protocols.rank_layout import Layout


def config(**fleet: object) -> Config:
    return Config(model=ModelConfig(name="m"), task=TaskConfig(prompts="p"), fleet=FleetConfig.model_validate(fleet))


def test_a_worker_gets_its_threads_whatever_is_inherited() -> None:
    environment = worker_environment({"OMP_NUM_THREADS": "64", "HOME": "/home/me"}, threads=3)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["HOME"] == "/home/me"


def test_memory_of_frames_is_kept_only_where_rows_travel_as_frames() -> None:
    assert "MALLOC_MMAP_MAX_" not in worker_environment({}, wire="ipc")
    assert worker_environment({}, wire="tcp")["MALLOC_MMAP_MAX_"] == "0"
    assert worker_environment({"MALLOC_MMAP_MAX_": "9"}, wire="tcp")["MALLOC_MMAP_MAX_"] == "9"


def test_sockets_lie_in_a_private_folder_with_short_names() -> None:
    with LocalLauncher("feedbeef") as launcher:
        assert stat.S_IMODE(launcher.sockets.stat().st_mode) == 0o700
        longest = launcher.addresses("generation10.10-1000-0a0b0c0d").control.removeprefix("ipc://")
        assert len(os.fsencode(longest)) <= 107
    assert not launcher.sockets.exists()


async def test_a_worker_with_other_threads_than_its_forks_is_spawned(tmp_path: Path) -> None:
    forks = Forks(worker_environment({}, threads=2), ())
    assert [forks.have_threads(threads) for threads in (1, 2)] == [False, True]
    with LocalLauncher("feedbeef", forks=forks) as launcher:
        worker = await launcher.spawn(spec(launcher, tmp_path, "echo0.0-0-a"))
        assert parent_of(worker.pid) == os.getpid()
        worker.kill()
        async with asyncio.timeout(60):
            await worker.wait()
        launcher.clean_up(worker.spec)


async def test_in_a_hurry_those_that_stop_are_killed_and_those_that_work_are_not(tmp_path: Path) -> None:
    with LocalLauncher("feedbeef") as launcher:
        specs = [spec(launcher, tmp_path, instance) for instance in ("echo0.0-0-a", "echo0.0-0-b")]
        stopping, working = [await launcher.spawn(each) for each in specs]
        for worker in (stopping, working):
            os.kill(worker.pid, signal.SIGSTOP)  # It hears nothing.
        stopping.stop()
        launcher.hurry()
        async with asyncio.timeout(60):
            assert await stopping.wait() == "killed by SIGKILL"
        assert lives(working)
        working.stop()
        async with asyncio.timeout(60):
            assert await working.wait() == "killed by SIGKILL"
        for each in specs:
            launcher.clean_up(each)


async def test_the_death_of_a_worker_that_was_told_something_after_it_is_heard_of(tmp_path: Path) -> None:
    with LocalLauncher("feedbeef") as launcher:
        order = spec(launcher, tmp_path, "echo0.0-0-a")
        worker = await launcher.spawn(order)
        kill(worker)
        worker.stop()
        async with asyncio.timeout(60):
            assert await worker.wait() == "killed by SIGKILL"
        launcher.clean_up(order)


def kill(worker: LocalWorker) -> None:
    """It is dead when this returns, and nobody has heard of it."""
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


def lives(worker: LocalWorker) -> bool:
    return os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def spec(launcher: LocalLauncher, run_dir: Path, instance: str) -> WorkerSpec:
    facts = RunFacts("feedbeef", run_dir, Path(), 0, "none", config())
    return WorkerSpec("echo", 0, 0, Layout(), instance, "nowhere:None", launcher.addresses(instance), facts)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_clean_end_leaves_nothing_also_without_the_sweeper(how: signal.Signals) -> None:
    run = secrets.token_hex(8)
    with LocalLauncher(run) as launcher:
        while not (found := processes_with(run)):  # The kernel sets the arguments a moment after Popen has returned.
            os.sched_yield()
        (sweeper,) = found
        os.kill(sweeper, how)
        if how == signal.SIGKILL:
            os.waitid(os.P_PID, sweeper, os.WEXITED | os.WNOWAIT)
        left = Segment.create(f"asyncrl-{run}-0-x.rows", 64)
        left.close()
    assert not launcher.sockets.exists()
    assert not left.path.exists()
    assert processes_with(run) == []


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def processes_with(argument: str) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdecimal() and argument.encode() in (process / "cmdline").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def test_tcp_addresses_are_of_this_machine_only_and_differ() -> None:
    with LocalLauncher("feedbeef", "tcp") as launcher:
        addresses = launcher.addresses("echo0.0-0-a")
    three = {addresses.control, addresses.work, addresses.data}
    assert len(three) == 3
    assert all(address.startswith("tcp://127.0.0.1:") for address in three)
