"""The number of workers changes while the supervisor runs, on virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError, Refused
from asyncrl.fleet import fleet
from asyncrl.fleet.fleet import MOST_WORKERS, Platform, RunningFleet, ServiceSpec, scale
from asyncrl.fleet.launching.run_access import open_commands, send_command
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.protocols.messages import Call
from asyncrl.protocols.service_contracts import Generation, Reward, Training
from tests.unit.fleet.fake_workers import FACTS, FakeConnection, FakeProcess
from tests.virtual_time import within

SPECS = [
    ServiceSpec("generation", Generation, "x:Y"),
    ServiceSpec("reward", Reward, "x:Y", scales=False),
    ServiceSpec("training", Training, "x:Y"),
]


class Hosts:
    """Starts fake workers; of a service in `absent` nobody comes."""

    def __init__(self) -> None:
        self.processes: dict[str, FakeProcess] = {}
        self.absent = False

    async def spawn(self, spec: WorkerSpec) -> FakeProcess:
        if self.absent:
            await asyncio.Event().wait()
        self.processes[spec.instance] = FakeProcess(spec)
        return self.processes[spec.instance]

    def clean_up(self, spec: WorkerSpec) -> None:
        del self.processes[spec.instance]


async def _starts() -> None:
    """A worker that takes calls at once."""


@dataclass
class Scene:
    """A fleet of which the processes and connections are fakes."""

    fleet: RunningFleet
    hosts: Hosts
    said: list[str]
    supervision: "asyncio.Task[None]"

    def alive(self) -> list[str]:
        return [worker.name for worker in self.fleet.workers["generation"] if worker.alive]

    def listed(self) -> list[str]:
        return [worker.name for worker in self.fleet.workers["generation"]]

    async def scale(self, count: int, seconds: float = 1.0) -> str:
        """Scales generation, and lets so many seconds pass."""
        done = scale(self.fleet, "generation", count)
        await asyncio.sleep(seconds)
        return done


@within
@asynccontextmanager
async def playing() -> AsyncIterator[Scene]:
    hosts = Hosts()
    said = list[str]()
    numbers = iter(range(1000))
    platform = Platform(InprocWire(), lambda spec: hosts, lambda: f"{next(numbers):08x}", lambda line: None)
    fleet = RunningFleet(platform, SPECS, FACTS, said.append, "asyncrl run")
    fleet.supervisor._connect = lambda spec: FakeConnection(_starts, greets=True)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(fleet.supervisor.run())
        await fleet.supervisor.all_started.wait()
        yield Scene(fleet, hosts, said, running)
        running.cancel()


@playing
async def test_more_workers_start_and_fewer_end_with_the_highest_numbers(scene: Scene) -> None:
    assert await scene.scale(3) == "generation: 1 -> 3; generation1.0, generation2.0 start"
    assert scene.alive() == ["generation0.0", "generation1.0", "generation2.0"]
    assert await scene.scale(2) == "generation: 3 -> 2; generation2.0 end with what they have, within 60 s"
    assert scene.alive() == scene.listed() == ["generation0.0", "generation1.0"]
    assert "generation2.0-0-" in scene.said[-1]
    assert scene.said[-1].endswith("has left: it finished what it had")
    await asyncio.sleep(60)
    assert scene.alive() == ["generation0.0", "generation1.0"], "it stays away"
    assert await scene.scale(3) == "generation: 2 -> 3; generation2.0 start"
    assert len(scene.alive()) == 3


@pytest.mark.parametrize("is_wanted_again", [False, True])
@playing
async def test_a_worker_ends_only_when_it_has_finished_and_comes_back_if_it_is_wanted_again(
    scene: Scene, is_wanted_again: bool
) -> None:
    await scene.scale(2)
    replica = scene.fleet.workers["generation"].replicas[1]
    with replica:
        await scene.scale(1, fleet.DRAIN / 2)
        assert scene.alive() == ["generation0.0", "generation1.0"]
        assert not replica.free
        if is_wanted_again:
            await scene.scale(2, 0.0)
    await asyncio.sleep(2)
    assert scene.alive() == ["generation0.0", "generation1.0"][: 1 + is_wanted_again]
    assert replica.free == is_wanted_again


@playing
async def test_a_worker_that_nobody_has_started_yet_goes_first(scene: Scene) -> None:
    scene.hosts.absent = True
    await scene.scale(3)
    await scene.scale(1)
    assert scene.alive() == scene.listed() == ["generation0.0"]


@pytest.mark.parametrize(
    ("service", "count", "why"),
    [
        ("generatoin", 2, r"no service 'generatoin' .* The services that may are generation$"),
        ("training", 2, r"the number of training workers does not change .* training.layout"),
        ("reward", 2, "reward has one worker in this run"),
        ("generation", 0, f"generation=0 is out of range: write 1 to {MOST_WORKERS}"),
        ("generation", MOST_WORKERS + 1, "is out of range"),
    ],
)
@playing
async def test_what_cannot_be_is_refused_and_changes_nothing(scene: Scene, service: str, count: int, why: str) -> None:
    with pytest.raises(Refused, match=why):
        scale(scene.fleet, service, count)
    assert scene.listed() == ["generation0.0"]


@playing
async def test_a_run_that_is_ending_starts_no_more_workers(scene: Scene) -> None:
    for process in scene.hosts.processes.values():
        process.ignores = ("stop",)
    scene.supervision.cancel()
    await asyncio.sleep(1)
    with pytest.raises(Refused, match=r"the run is ending, and starts no generation1\.0 any more"):
        scale(scene.fleet, "generation", 2)


# ---- the way of a command --------------------------------------------------------------------------------


async def test_a_command_reaches_the_run_and_its_refusal_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "commands.json"

    async def commands(call: Call) -> str:
        if call.args == ("training", 1):
            raise Refused("training does not scale")
        return f"{call.method} {call.args}"

    async with open_commands(file, f"ipc://{tmp_path}/socket", commands):
        assert file.stat().st_mode & 0o777 == 0o600
        assert await send_command(file, "scale", "generation", 3) == "scale ('generation', 3)"
        with pytest.raises(ConfigError, match="training does not scale"):
            await send_command(file, "scale", "training", 1)
        content = file.read_text()
    assert not file.exists()
    with pytest.raises(ConfigError, match="holds no run: name a run directory"):
        await send_command(file, "scale", "generation", 3)
    file.write_text(content)  # As a run leaves it that was killed.
    with pytest.raises(ConfigError, match=r"no run in .* answers at ipc://"):
        await send_command(file, "scale", "generation", 3)


async def test_nobody_commands_a_run_without_its_keys(tmp_path: Path) -> None:
    async def commands(call: Call) -> str:
        raise AssertionError("no call came through")

    ours = tmp_path / "ours.json"
    others = tmp_path / "others.json"
    async with (
        open_commands(ours, "tcp://127.0.0.1:*", commands),
        open_commands(others, "tcp://127.0.0.1:*", commands),
    ):
        address = ours.read_text().partition(",")[0]
        ours.write_text(address + "," + others.read_text().partition(",")[2])
        with pytest.raises(ConfigError, match=r"no run in .* answers"):
            await send_command(ours, "scale", "generation", 3)


@playing
async def test_workers_in_a_pool_of_gpus_get_one_each_and_no_more_than_there_are(scene: Scene) -> None:
    scene.fleet.specs["generation"] = replace(SPECS[0], devices=[("cuda:1",), ("cuda:0",)])
    with pytest.raises(Refused, match="the pool of generation has room for 2"):
        await scene.scale(3)
    await scene.scale(2, 5)
    devices = {name.split("-")[0]: process.spec.devices for name, process in scene.hosts.processes.items()}
    assert devices.pop("generation1.0") == ("cuda:0",)
    assert devices == dict.fromkeys(("generation0.0", "reward0.0", "training0.0"), ())
