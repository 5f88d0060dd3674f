"""The supervisor on virtual time, over processes that end when the test says so."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest

from asyncrl.errors import ConfigError, FleetFailed, PeerLost
from asyncrl.fleet import supervisor
from asyncrl.fleet.launching.launcher import end_worker
from asyncrl.fleet.lifecycle_events import FleetEvent, WorkerCleanedUp, WorkerLost, WorkerStarted
from asyncrl.fleet.replicas import Replicas
from asyncrl.fleet.supervisor import Supervisor, WorkerSlot
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.distribute_collect import ONE_OF
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import EndpointSpec, Idempotent, Lane
from asyncrl.simulation import virtual_loop
from tests.unit.fleet.fake_workers import FakeConnection, FakeProcess, spec_of


class Stage:
    """A supervisor over fakes, and everything it did, with times."""

    def __init__(
        self, *, restart: bool = True, greets: bool = True, start: Callable[[int], Awaitable[None]] | None = None
    ) -> None:
        self.workers = Replicas("echo", 1, Layout())
        self.worker = self.workers.worker(0, 0)
        self.processes: list[FakeProcess] = []
        self.connections: list[FakeConnection] = []
        self.events: list[tuple[float, str]] = []
        self.hosts: list[HostId] = []
        self.left = 0
        self.drained = 0
        self.reasons: list[str] = []
        self.isolated: dict[int, frozenset[str]] = {}
        self.spawned = asyncio.Condition()
        self._start = start
        self._greets = greets
        self.slot = WorkerSlot(self.worker, self.workers, self._make_spec, self, restart)
        self.supervisor = Supervisor([self.slot], self._connect, self._emit, "asyncrl run", self.isolated)

    def note(self, event: str) -> None:
        self.events.append((asyncio.get_running_loop().time(), event))

    def _make_spec(self) -> WorkerSpec:
        instance = f"echo0.0-0-{len(self.processes)}"
        return spec_of(instance)

    async def spawn(self, spec: WorkerSpec) -> FakeProcess:
        self.note(f"spawn {spec.instance}")
        self.processes.append(FakeProcess(spec))
        if self.hosts:
            self.processes[-1].host = self.hosts[len(self.processes) - 1]
        return self.processes[-1]

    def clean_up(self, spec: WorkerSpec) -> None:
        self.note(f"clean up {spec.instance}")

    def _connect(self, spec: WorkerSpec) -> FakeConnection:
        async def start() -> None:
            if self._start is not None:
                await self._start(len(self.processes))

        self.connections.append(FakeConnection(start, self._greets))
        return self.connections[-1]

    def _emit(self, event: FleetEvent) -> None:
        self.instances = sorted(each.spec.instance for each in self.supervisor.instances.values())
        match event:
            case WorkerStarted():
                self.note(f"started {event.instance}")
            case WorkerLost():
                assert not self.worker.alive, "callers must look elsewhere before the event"
                self.note(f"lost {event.instance}")
                self.reasons.append(event.reason)
                self.left += event.has_left
                self.drained += event.is_drained
            case WorkerCleanedUp():
                assert self.processes[-1].dead
                self.note(f"cleaned up {event.instance}")

    async def kill(self) -> None:
        self.processes[-1].die()
        await self.connections[-1].lost.wait()

    async def wait_for_live(self) -> None:
        await self.workers.wait_for_live(asyncio.get_running_loop().time() + 1000)


def acting(play: Callable[[Stage], Awaitable[None]], **options: Any) -> Stage:
    """Run `play` beside the supervisor, on virtual time."""
    stages = []

    async def main() -> None:
        stage = Stage(**options)
        stages.append(stage)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(stage.supervisor.run())
            await play(stage)
            running.cancel()

    virtual_loop.run(main())
    return stages[0]


async def caught(call: Awaitable[None]) -> str:
    with pytest.raises(PeerLost) as lost:
        await call
    return str(lost.value)


def test_a_dead_worker_is_restarted_after_a_growing_pause() -> None:
    async def play(stage: Stage) -> None:
        for _ in range(4):
            await stage.wait_for_live()
            stage.supervisor.progressed()
            await stage.kill()
        await stage.wait_for_live()

    events = acting(play).events
    spawned = [at for at, event in events if event.startswith("spawn")]
    assert [round(later - earlier, 3) for earlier, later in pairwise(spawned)] == [0.5, 1, 2, 4]
    names = [event for _, event in events][:6]
    assert names == [
        "spawn echo0.0-0-0",
        "started echo0.0-0-0",
        "lost echo0.0-0-0",
        "clean up echo0.0-0-0",
        "cleaned up echo0.0-0-0",
        "spawn echo0.0-0-1",
    ]


def test_outstanding_calls_fail_with_the_cause_of_death() -> None:
    async def play(stage: Stage) -> None:
        await stage.wait_for_live()
        stage.processes[0].die()
        await stage.connections[0].lost.wait()
        assert stage.connections[0].reason == "killed by SIGKILL"
        assert stage.worker.status == "echo0.0 does not answer: killed by SIGKILL"

    acting(play)


HANG = EndpointSpec("hang", ONE_OF, Lane.WORK, Idempotent.NO, False)


def test_a_death_that_a_socket_tells_first_has_the_cause_that_the_kernel_knows() -> None:
    async def play(stage: Stage) -> None:
        await stage.wait_for_live()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(caught(stage.worker.call(HANG, (), 60.0)))
            await asyncio.sleep(1)
            stage.connections[0].fail("the connection to ipc://echo broke")
            assert not stage.worker.alive
            await asyncio.sleep(0.3)
            stage.processes[0].die("exited with status 3")
        assert call.result() == "echo0.0-0-0: exited with status 3"
        assert stage.reasons == ["exited with status 3"]

    acting(play)


def test_a_link_that_broke_for_itself_is_the_cause() -> None:
    async def play(stage: Stage) -> None:
        await stage.wait_for_live()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(caught(stage.worker.call(HANG, (), 60.0)))
            await asyncio.sleep(1)
            stage.connections[0].fail("a gap in the numbers")
        assert call.result() == "echo0.0-0-0: a gap in the numbers"
        assert stage.reasons == ["a gap in the numbers"]

    acting(play)


def test_six_deaths_without_a_finished_group_end_the_fleet() -> None:
    async def play(stage: Stage) -> None:
        for _ in range(supervisor.MAX_DEATHS):
            await stage.wait_for_live()
            await stage.kill()
        await asyncio.Event().wait()

    with pytest.RaisesGroup(pytest.RaisesExc(FleetFailed, match="echo0.0 died 6 times .* Resume with: asyncrl run")):
        acting(play)


@pytest.mark.parametrize(("alone", "others", "ends"), [(True, (), False), (True, (8,), True), (False, (), True)])
def test_the_fleet_goes_on_while_one_suspect_is_tested(alone: bool, others: tuple[int, ...], ends: bool) -> None:
    """Eight deaths of a worker that worked for group 7; it ends when others were there, or 7 is no suspect."""

    async def play(stage: Stage) -> None:
        if alone:
            stage.isolated[7] = frozenset()
        stage.worker.groups_at = lambda instance: [7, *others]  # type: ignore[method-assign]
        for _ in range(supervisor.MAX_DEATHS if ends else supervisor.MAX_DEATHS + 2):
            await stage.wait_for_live()
            await stage.kill()
        if ends:
            await asyncio.Event().wait()

    with pytest.RaisesGroup(pytest.RaisesExc(FleetFailed, match="died 6 times")) if ends else nullcontext():
        acting(play)


def test_the_death_of_a_worker_that_cannot_be_restarted_ends_the_fleet_at_once() -> None:
    async def play(stage: Stage) -> None:
        await stage.wait_for_live()
        await stage.kill()
        with pytest.raises(FleetFailed, match="killed by SIGKILL"):
            await stage.wait_for_live()
        await asyncio.Event().wait()

    with pytest.RaisesGroup(pytest.RaisesExc(FleetFailed, check=lambda error: error.exit_code == 75)):
        acting(play, restart=False)


def test_a_slow_start_is_no_death() -> None:
    async def slow(_: int) -> None:
        await asyncio.sleep(50)

    async def play(stage: Stage) -> None:
        await stage.supervisor.all_started.wait()
        assert asyncio.get_running_loop().time() == 50

    assert len(acting(play, start=slow).processes) == 1


def test_what_a_worker_raises_at_its_first_start_ends_the_fleet_as_it_is() -> None:
    async def refuse(_: int) -> None:
        raise ConfigError("write this instead")

    async def play(stage: Stage) -> None:
        await stage.supervisor.all_started.wait()

    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="write this instead")):
        acting(play, start=refuse)


def test_what_a_worker_raises_at_a_restart_counts_as_a_death() -> None:
    async def refuse_second(count: int) -> None:
        if count == 2:
            raise ConfigError("the model is gone")

    async def play(stage: Stage) -> None:
        await stage.wait_for_live()
        await stage.kill()
        await stage.wait_for_live()
        assert len(stage.processes) == 3

    stage = acting(play, start=refuse_second)
    assert [event for _, event in stage.events if event.startswith("started")] == [
        "started echo0.0-0-0",
        "started echo0.0-0-2",
    ]


def test_a_worker_that_lives_but_never_greets_ends_the_fleet() -> None:
    async def play(stage: Stage) -> None:
        async with asyncio.timeout(60):
            await stage.supervisor.all_started.wait()

    with pytest.RaisesGroup(pytest.RaisesExc(FleetFailed, match="it hung up")):
        acting(play, greets=False)


def test_a_broken_link_ends_the_worker_behind_it() -> None:
    async def play(stage: Stage) -> None:
        await stage.wait_for_live()
        stage.connections[0].fail("a gap in the numbers")
        assert not stage.worker.alive
        await stage.wait_for_live()
        assert stage.processes[0].requests == ["stop"]

    assert "lost echo0.0-0-0" in [event for _, event in acting(play).events]


def test_leaving_stops_and_cleans_up_all_workers() -> None:
    async def play(stage: Stage) -> None:
        await stage.wait_for_live()
        assert stage.instances == ["echo0.0-0-0"]

    stage = acting(play)
    assert stage.processes[0].requests == ["stop"]
    assert [event for _, event in stage.events[-2:]] == ["clean up echo0.0-0-0", "cleaned up echo0.0-0-0"]
    assert not stage.instances


def test_a_worker_that_is_started_again_elsewhere_is_in_another_fault_domain() -> None:
    domains = []

    async def play(stage: Stage) -> None:
        stage.hosts = [HostId("a"), HostId("b")]
        for _ in range(2):
            await stage.wait_for_live()
            domains.append(stage.worker.host.fault_domain)
            await stage.kill()

    acting(play)
    assert domains == ["a", "b"]


def test_a_worker_whose_host_left_does_not_count_as_dead() -> None:
    async def play(stage: Stage) -> None:
        for _ in range(2 * supervisor.MAX_DEATHS):
            await stage.wait_for_live()
            stage.processes[-1].has_left = True
            await stage.kill()
        await stage.wait_for_live()

    stage = acting(play)
    assert stage.left == 2 * supervisor.MAX_DEATHS


def test_a_fleet_begins_without_the_workers_that_may_join_later() -> None:
    async def main() -> None:
        stage = Stage()
        late = Replicas("late", 1, Layout())
        never = WorkerSlot(late.worker(0, 0), late, stage._make_spec, NeverLauncher(), restart=True, is_awaited=False)
        stage.supervisor._slots.append(never)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(stage.supervisor.run())
            await stage.supervisor.all_started.wait()
            running.cancel()

    virtual_loop.run(main())


class NeverLauncher:
    """Waits for a host that does not come."""

    async def spawn(self, spec: WorkerSpec) -> FakeProcess:
        await asyncio.Event().wait()
        raise AssertionError

    def clean_up(self, spec: WorkerSpec) -> None:
        raise AssertionError


def test_a_worker_that_does_not_listen_is_ended_within_ten_seconds() -> None:
    async def main() -> tuple[list[str], float]:
        process = FakeProcess(spec_of("echo0.0-0-0"), ignores=("stop", "terminate"))
        await end_worker(process)
        return process.requests, asyncio.get_running_loop().time()

    told, seconds = virtual_loop.run(main())
    assert told == ["stop", "terminate", "kill"]
    assert seconds < 10


def test_a_worker_that_lived_long_is_restarted_as_if_it_had_never_died() -> None:
    async def play(stage: Stage) -> None:
        for lived in (0, 0, 0, supervisor.LONG_LIFE, 0):
            await stage.wait_for_live()
            await asyncio.sleep(lived)
            stage.supervisor.progressed()
            await stage.kill()
        await stage.wait_for_live()

    spawned = [at for at, event in acting(play).events if event.startswith("spawn")]
    pauses = [round(later - earlier, 3) for earlier, later in pairwise(spawned)]
    assert pauses == [0.5, 1, 2, supervisor.LONG_LIFE + 0.5, 1]


def test_a_worker_that_answered_work_is_restarted_as_if_it_had_never_died() -> None:
    async def play(stage: Stage) -> None:
        for worked in (False, False, True, False):
            await stage.wait_for_live()
            stage.worker.has_worked = worked
            stage.supervisor.progressed()
            await stage.kill()
        await stage.wait_for_live()

    spawned = [at for at, event in acting(play).events if event.startswith("spawn")]
    assert [round(later - earlier, 3) for earlier, later in pairwise(spawned)] == [0.5, 1, 0.5, 1]


def test_a_worker_that_dies_while_it_starts_is_lost() -> None:
    async def start(instances: int) -> None:
        if instances == 1:
            await asyncio.Event().wait()

    async def play(stage: Stage) -> None:
        await asyncio.sleep(1)
        stage.processes[0].die("killed by SIGSEGV")
        await stage.wait_for_live()

    assert acting(play, start=start).reasons == ["killed by SIGSEGV"]
