"""Killing things: workers, the trainer, the controller. Real processes, stand-in services."""

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from asyncrl.config.schema import Config, FleetConfig, ModelConfig, TaskConfig
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.errors import FleetFailed, PeerLost
from asyncrl.fleet import supervisor
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.fleet.launching import launcher
from asyncrl.fleet.lifecycle_events import FleetEvent, WorkerCleanedUp, WorkerLost, WorkerStarted
from asyncrl.fleet.supervisor import Learners
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.wire import Wakeup
from tests.processes import descendants

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from standins import Echo, Trainer, forks_without_torch  # noqa: E402
from watching import PATIENCE, dead, wait_until, workers_of  # noqa: E402

pytestmark = pytest.mark.fleet


Start = Literal["fork", "spawn"]


@pytest.fixture(autouse=True)
def _standins_can_be_imported(monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)


@pytest.fixture(params=["fork", "spawn"])
def start(request: pytest.FixtureRequest) -> Start:
    """How workers are started; whatever happens to them then must not depend on it."""
    return "fork" if request.param == "fork" else "spawn"


def facts_at(run_dir: Path, start: Start) -> RunFacts:
    config = Config(model=ModelConfig(name="none"), task=TaskConfig(prompts="none"), fleet=FleetConfig(start=start))
    return RunFacts(secrets.token_hex(4), run_dir, run_dir, 0, "none", config)


@asynccontextmanager
async def fleet_in(
    tmp_path: Path, start: Start, report: Callable[[str], None] = print, *, replicas: int = 2, **options: Any
) -> AsyncIterator[RunningFleet]:
    facts = facts_at(tmp_path, start)
    specs = [
        ServiceSpec("echo", Echo, "standins:EchoService", replicas=replicas, options=options),
        ServiceSpec("training", Trainer, "standins:TrainerService"),
    ]
    with (
        forks_without_torch(facts.config, report) as forks,
        LocalLauncher(facts.run, forks=forks) as launcher,
    ):
        async with running_fleet(specs, facts, launcher=launcher, report=report, resume="asyncrl run x") as running:
            yield running


def processes_of(run_dir: Path) -> dict[str, int]:
    return {f"{service}{replica}": pid for (service, replica, _), pid in workers_of(run_dir).items()}


async def test_killed_worker_fails_its_calls_at_once_and_restarts(start: Start, tmp_path: Path) -> None:
    async with fleet_in(tmp_path, start) as running, asyncio.timeout(PATIENCE):
        echo = running.handle("echo", Echo)
        back = Wakeup()
        lost: list[tuple[str, str]] = []

        def note(event: FleetEvent) -> None:
            if isinstance(event, WorkerLost):
                lost.append((event.instance, event.reason))
            elif isinstance(event, WorkerStarted):
                back.wake()

        running.subscribers.append(note)
        back_again = asyncio.ensure_future(back.wait())
        waiting = [asyncio.ensure_future(echo.wait()) for _ in range(2)]
        before = processes_of(tmp_path)
        assert sorted(await echo.pids()) == sorted(pid for name, pid in before.items() if name != "training0")

        victim = running.workers["echo"].worker(0, 0).instance
        os.kill(before["echo0"], signal.SIGKILL)
        (failed,), others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(PeerLost, match=f"^{victim}: killed by SIGKILL$"):
            await failed
        waiting = [failed, *others]
        assert not back_again.done(), "the call ended with its worker, not with the next one's start"
        assert not waiting[1].done()
        assert "from echo1" in await echo.echo("meanwhile")

        await back_again
        assert lost == [(victim, "killed by SIGKILL")]
        after = processes_of(tmp_path)
        assert after["echo0"] != before["echo0"]
        assert {name: pid for name, pid in after.items() if name != "echo0"} == {
            name: pid for name, pid in before.items() if name != "echo0"
        }
        assert sorted(await echo.pids()) == sorted((after["echo0"], after["echo1"]))
        waiting[1].cancel()
        await asyncio.wait(waiting)


async def test_an_error_of_one_of_two_ends_its_process_and_no_other(tmp_path: Path) -> None:
    async with fleet_in(tmp_path, "fork") as running, asyncio.timeout(PATIENCE):
        echo = running.handle("echo", Echo)
        back = Wakeup()
        running.subscribers.append(lambda event: back.wake() if isinstance(event, WorkerStarted) else None)
        before = processes_of(tmp_path)
        back_again = asyncio.ensure_future(back.wait())
        with pytest.raises(PeerLost, match=r"(echo\d)\.0-0-\w+: \1\[0\] raised KeyError: 'nothing under that name'"):
            await echo.fail()
        assert (await echo.echo("meanwhile")).startswith("meanwhile from echo")
        await back_again
        changed = {name for name, pid in processes_of(tmp_path).items() if before[name] != pid}
        assert changed in ({"echo0"}, {"echo1"})
        assert all(dead(before[name]) for name in changed)


async def test_a_replica_that_is_added_and_cannot_start_costs_its_offer_only(tmp_path: Path) -> None:
    said: list[str] = []
    place = str(tmp_path / "broke")
    async with (
        fleet_in(tmp_path, "fork", said.append, replicas=1, breaks_unless=place) as running,
        asyncio.timeout(PATIENCE),
    ):
        started = Wakeup()
        running.subscribers.append(lambda event: started.wake() if isinstance(event, WorkerStarted) else None)
        before = processes_of(tmp_path)
        running.add_replica("echo")
        await started.wait()
        assert {**processes_of(tmp_path), **before} == processes_of(tmp_path), "the others are the processes they were"
        (lost,) = said
        assert "it could not start on " in lost
        assert "echo1[0] raised RuntimeError: CUDA out of memory; it is started again" in lost


async def test_an_error_of_a_rank_that_learns_ends_the_set_and_no_other_process(tmp_path: Path) -> None:
    async with fleet_in(tmp_path, "fork") as running, asyncio.timeout(PATIENCE):
        learners = running.supervisor.learners = Learners()
        back = Wakeup()
        before = processes_of(tmp_path)
        running.subscribers.append(lambda event: back.wake() if isinstance(event, WorkerStarted) else None)
        with pytest.raises(PeerLost, match=r"training0\[0\] raised RuntimeError: CUDA error"):
            await running.handle("training", Trainer).fail()
        assert (await learners.lost).startswith("training0.0 died: training0[0] raised RuntimeError: CUDA error")
        await running.supervisor.end_learners()
        learners.start_again()
        await back.wait()
        after = processes_of(tmp_path)
        assert {name for name, pid in after.items() if before[name] != pid} == {"training0"}


async def test_killed_instance_is_reported_cleaned_up_once_its_process_is_dead(start: Start, tmp_path: Path) -> None:
    async with fleet_in(tmp_path, start) as running, asyncio.timeout(PATIENCE):
        cleaned_up: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        pid = processes_of(tmp_path)["echo1"]

        def note(event: FleetEvent) -> None:
            if isinstance(event, WorkerCleanedUp):
                cleaned_up.put_nowait((event.instance, not dead(pid)))

        running.subscribers.append(note)
        victim = running.workers["echo"].worker(1, 0).instance
        running.supervisor.kill(victim)
        assert await cleaned_up.get() == (victim, False)


async def test_a_call_waits_for_a_replica_when_all_are_dead(start: Start, tmp_path: Path) -> None:
    async with fleet_in(tmp_path, start) as running, asyncio.timeout(PATIENCE):
        gone = asyncio.Barrier(3)
        waits: list[asyncio.Future[int]] = []

        def note(event: FleetEvent) -> None:
            if isinstance(event, WorkerLost):
                waits.append(asyncio.ensure_future(gone.wait()))

        running.subscribers.append(note)
        for name, pid in processes_of(tmp_path).items():
            if name.startswith("echo"):
                os.kill(pid, signal.SIGKILL)
        await gone.wait()
        assert not any(worker.alive for worker in running.workers["echo"])
        assert (await running.handle("echo", Echo).echo("still")).startswith("still")


async def test_trainer_death_ends_the_fleet_and_names_the_resume_command(start: Start, tmp_path: Path) -> None:
    pids: dict[str, int] = {}

    async def run() -> None:
        async with asyncio.timeout(PATIENCE), fleet_in(tmp_path, start) as running:
            pids.update(processes_of(tmp_path))
            os.kill(pids["training0"], signal.SIGKILL)
            await running.handle("echo", Echo).wait()

    with pytest.raises(FleetFailed, match=r"training0\.0 died: .*killed by SIGKILL.*asyncrl run x") as failed:
        await run()
    assert failed.value.exit_code == 75
    assert not [pid for pid in pids.values() if not dead(pid)]


async def test_worker_death_during_start_ends_the_fleet_with_the_last_output(
    start: Start, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.02)  # Its default would have this test wait for 7.5 s.
    with pytest.raises(FleetFailed, match="exited with status 7"):
        async with asyncio.timeout(PATIENCE), fleet_in(tmp_path, start, replicas=1, dies=True):
            pytest.fail("it started")


async def test_worker_death_before_the_handover_of_the_fleet_is_reported(start: Start, tmp_path: Path) -> None:
    said: list[str] = []
    async with (
        asyncio.timeout(PATIENCE),
        fleet_in(tmp_path, start, said.append, dies_unless=str(tmp_path / "died")) as running,
    ):
        assert await running.handle("echo", Echo).echo("hello")
    assert [re.sub("-0-[0-9a-f]{8}", "", line).partition(" (output")[0] for line in said] == [
        "lost echo0.0: exited with status 7"
    ]
    assert said[0].endswith("; it is started again")


async def test_a_stuck_event_loop_does_not_keep_a_worker_alive(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages take a fifth of their time, so that the test does not wait for seven seconds."""
    assert sum(seconds for _, seconds in launcher.STOP_STAGES) < 10
    short = tuple((stage, seconds / 5) for stage, seconds in launcher.STOP_STAGES)
    monkeypatch.setattr(launcher, "STOP_STAGES", short)
    async with fleet_in(tmp_path, start) as running:
        pids = processes_of(tmp_path)
        os.kill(pids["echo0"], signal.SIGSTOP)
        ending = asyncio.get_running_loop().time()
        del running
    assert asyncio.get_running_loop().time() - ending < 10
    assert not [pid for pid in pids.values() if not dead(pid)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_controller(start: Start, tmp_path: Path, how: signal.Signals) -> None:
    run = secrets.token_hex(4)
    program = [sys.executable, str(HERE / "fleet_parent.py"), run, str(tmp_path), start]
    parent = subprocess.Popen(program, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_until((tmp_path / "up").exists, "the fleet", 30)
    pids = list(processes_of(tmp_path).values())
    assert not any(map(dead, pids))
    forked_from = descendants(parent.pid) - set(pids)
    if how == signal.SIGKILL:
        os.kill(pids[0], signal.SIGSTOP)  # Its loop sees no end of file.
    parent.send_signal(how)
    parent.wait(20)
    wait_until(lambda: all(map(dead, pids)), "the workers to end with their parent", 5)
    wait_until(lambda: all(map(dead, forked_from)), "what they were forked from to end, too", 5)
    wait_until(lambda: not left_by(run), lambda: f"the end of {left_by(run)}", 5)


def left_by(run: str) -> list[Path]:
    folders = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    return [path for folder in folders for path in folder.glob(f"asyncrl-{run}-*")]


def test_a_worker_without_torch_imports_little() -> None:
    code = "import asyncrl.deploy.process.worker_main, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    modules = done.stdout.split()
    assert not {"torch", "transformers", "tokenizers", "sympy", "datasets"} & set(modules)
    assert len(modules) < 800
