"""Whole fleets of stand-in services, in one process and as processes of their own."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import Config, FleetConfig, ModelConfig, TaskConfig
from asyncrl.deploy.process.fork_client import Forks, worker_environment
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.errors import ConfigError, DeadlineExceeded, PeerLost, RemoteError
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.fleet.service_calls import make_handle
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.protocols.messages import PromptGroup

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from standins import Echo, EchoService  # noqa: E402
from watching import PATIENCE, workers_of  # noqa: E402

GROUP = PromptGroup(0, 0, 0, "hello", (0,), 1, 0, 1.0, 8, deadline=30.0)
Start = Callable[..., AbstractAsyncContextManager[RunningFleet]]


@pytest.fixture(scope="module")
def plain_forks() -> Iterator[Forks]:
    """All workers are forked from these; test_supervision.py spawns some."""
    folders = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    with Forks({**worker_environment(os.environ), "PYTHONPATH": folders}, ()) as forks:
        yield forks


@pytest.fixture(params=["inproc", "ipc", "tcp"])
def start(request: Any, tmp_path: Path, plain_forks: Forks) -> Start:

    @asynccontextmanager
    async def started(
        replicas: int = 1, watchdog: float = 60.0, report: Callable[[str], None] = print, **options: Any
    ) -> AsyncIterator[RunningFleet]:
        config = Config(
            model=ModelConfig(name="none"), task=TaskConfig(prompts="none"), fleet=FleetConfig(watchdog=watchdog)
        )
        keys = CurveKeys.fresh()
        facts = RunFacts(secrets.token_hex(4), tmp_path, tmp_path, 0, "none", config, curve=(keys.public, keys.secret))
        specs = [ServiceSpec("echo", Echo, "standins:EchoService", replicas=replicas, options=options)]
        plain_forks.serve(60.0, report)
        with LocalLauncher(facts.run, "tcp" if request.param == "tcp" else "ipc", plain_forks) as launcher:
            async with running_fleet(
                specs, facts, launcher=None if request.param == "inproc" else launcher, report=report
            ) as running:
                yield running
        assert not launcher.sockets.exists()

    return started


async def test_calls_reach_every_replica_and_are_answered(start: Start) -> None:
    async with start(replicas=2) as running:
        echo = running.handle("echo", Echo)
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(echo.echo(f"{number}")) for number in range(8)]
        assert [task.result().split()[0] for task in answers] == [f"{number}" for number in range(8)]
        assert {task.result().split()[-1].split("-")[0] for task in answers} == {"echo0.0", "echo1.0"}
        assert len(await echo.pids()) == 2


async def test_health_is_answered_while_a_worker_computes(start: Start) -> None:
    async with start() as running:
        echo = running.handle("echo", Echo)
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(echo.compute(0.4))
            while not (await echo.health())[0].doing:
                pass
            (health,) = await echo.health()
            assert not working.done()
            assert health.doing[0].startswith("compute for ")
        (health,) = await echo.health()
        assert 0.4 <= health.seconds["busy"] <= health.wall
        assert sum(health.seconds.values()) == pytest.approx(health.wall, rel=0.01)
        assert health.seconds["blocked"] == 0
        await echo.idle_because("blocked")
        assert (await echo.health())[0].seconds["blocked"] > 0


async def test_remote_error_has_the_traceback_of_the_worker(start: Start) -> None:
    async with start() as running:
        with pytest.raises(PeerLost, match=r"echo0\[0\] raised KeyError") as caught:
            await running.handle("echo", Echo).fail()
        assert isinstance(caught.value.__cause__, RemoteError)
        assert "in fail" in caught.value.__cause__.remote_traceback


async def test_closing_a_stream_stops_it_in_the_worker(start: Start) -> None:
    async with start() as running:
        echo = running.handle("echo", Echo)
        async with aclosing(echo.count(GROUP)) as numbers:  # type: ignore[type-var]
            async for number in numbers:
                if number == 200:
                    break
        async with asyncio.timeout(60):
            while await echo.closed() != [1]:
                pass


async def test_rows_go_from_worker_to_worker(start: Start) -> None:
    async with start(replicas=2) as running:
        echo = running.handle("echo", Echo)
        refs = await echo.make_rows([3, 5, 8])
        assert await echo.sum_rows(refs) == [3, 5, 8]
        await echo.release([row.name for row in refs], oldest=0)
        refs = await echo.make_rows([1] * 8)  # all eight slots are free again
        assert sum(await echo.sum_rows(refs)) == 8


async def test_a_worker_that_cannot_start_says_why(start: Start) -> None:
    with pytest.raises(ConfigError, match="this option is wrong, write that one"):
        async with start(refuses="this option is wrong, write that one"):
            pytest.fail("it started")


async def test_error_in_the_fleet_block_is_raised_without_a_group(start: Start) -> None:
    with pytest.raises(ZeroDivisionError):
        async with start():
            raise ZeroDivisionError


async def test_ended_fleet_leaves_no_shared_memory_and_no_workers(start: Start, tmp_path: Path) -> None:
    async with start(replicas=2) as running:
        run = running.facts.run
    assert not [name for name in os.listdir("/dev/shm") if run in name]
    assert workers_of(tmp_path) == {}


@pytest.mark.parametrize("start", ["inproc", "ipc"], indirect=True)
async def test_each_worker_has_one_line_in_the_file_of_its_start(start: Start, tmp_path: Path) -> None:
    for replicas in (4, 2):
        async with start(replicas=replicas) as running:
            lines = [json.loads(line) for line in (tmp_path / "fleet.jsonl").read_text().splitlines()]
            assert len(lines) == replicas, "a spawn writes one line, and a new start begins a new file"
            pids = {int(pid) for pid in await running.handle("echo", Echo).pids()}
            assert {line["pid"] for line in lines} == pids
            with (tmp_path / "fleet.jsonl").open("a") as file:
                file.write('{"ended": "echo0.')  # As a machine leaves it that crashes.
            assert set(workers_of(tmp_path)) == {("echo", number, 0) for number in range(replicas)}


async def test_a_call_without_an_answer_ends_at_its_deadline(start: Start) -> None:
    """Caller and worker both keep it, and either may be the first to say so."""
    async with start() as running:
        with pytest.raises(DeadlineExceeded, match=r"echo0\[0\] did not answer wait|wait was still running"):
            await make_handle(Echo, running.workers["echo"], 0.1).wait()


async def test_watchdog_names_the_worker_that_holds_a_call(start: Start) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    async with start(replicas=2, watchdog=0.2, report=told.put_nowait) as running:
        waiting = asyncio.ensure_future(running.handle("echo", Echo).wait())
        async with asyncio.timeout(60):
            while "has not answered" not in (text := await told.get()):
                pass
        (busy,) = [worker.name for worker in running.workers["echo"] if worker.outstanding]
        assert f"outstanding for longest is wait: {busy}" in text
        assert "runs wait for" in text
        assert all(worker.name in text for worker in running.workers["echo"])
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_fleet_mixes_services_in_processes_and_in_this_process(tmp_path: Path, monkeypatch: Any) -> None:
    """A service in this process may be any callable, and reads rows that another process made."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    config = Config(model=ModelConfig(name="none"), task=TaskConfig(prompts="none"))
    facts = RunFacts(secrets.token_hex(4), tmp_path, tmp_path, 0, "none", config)
    specs = [
        ServiceSpec("there", Echo, "standins:EchoService"),
        ServiceSpec("here", Echo, lambda context: EchoService(context), here=True),
    ]
    with LocalLauncher(facts.run) as launcher:
        async with running_fleet(specs, facts, launcher=launcher) as running:
            there = running.handle("there", Echo)
            here = running.handle("here", Echo)
            assert await here.pids() == [os.getpid()]
            assert await there.pids() != [os.getpid()]
            assert await here.sum_rows(await there.make_rows([4, 2])) == [4, 2]


async def test_workers_refuse_the_key_of_one_that_is_gone_before_it_is_started_again(
    tmp_path: Path, plain_forks: Forks
) -> None:
    config = Config(
        model=ModelConfig(name="none"), task=TaskConfig(prompts="none"), fleet=FleetConfig(wire="tcp", watchdog=60.0)
    )
    keys = CurveKeys.fresh()
    facts = RunFacts(secrets.token_hex(4), tmp_path, tmp_path, 0, "none", config, curve=(keys.public, keys.secret))
    specs = [ServiceSpec(name, Echo, "standins:EchoService") for name in ("generation", "reward")]
    plain_forks.serve(60.0, print)
    with LocalLauncher(facts.run, "tcp", plain_forks) as launcher:
        async with running_fleet(specs, facts, launcher=launcher) as running:
            generation = running.handle("generation", Echo)
            members = running.introductions._members
            owner = running.supervisor.instances["generation0.0"].spec.instance
            reader = running.supervisor.instances["reward0.0"].spec
            assert reader.curve is not None
            call = members[owner].control.call
            news = list[tuple[list[str], list[str]]]()

            async def noted(method: str, args: tuple[Any, ...], deadline: float) -> Any:
                answer = await call(method, args, deadline)
                news.append(args[0]["data"])
                return answer

            members[owner].control = SimpleNamespace(call=noted)
            running.supervisor.kill(reader.instance)
            async with asyncio.timeout(PATIENCE):
                while len(news) < 2:
                    await generation.pids()
            assert news[0] == ([], [reader.curve[0]]), "the key of the one that is gone is refused first"
            (key,), gone = news[1]
            assert key != reader.curve[0]
            assert gone == []
