"""The supervisor on virtual time, over processes that end when the test says so."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.recovery import why_lost
from asyncrl.errors import FleetFailed, PeerLost
from asyncrl.fleet import supervisor
from asyncrl.fleet.launching.launcher import end_worker
from asyncrl.fleet.lifecycle_events import FleetEvent, WorkerCleanedUp, WorkerLost, WorkerStarted
from asyncrl.fleet.replicas import Replicas
from asyncrl.fleet.supervisor import DeathCounter, Learners, Supervisor, WorkerSlot
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.distribute_collect import ONE_OF
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import EndpointSpec, Idempotent, Lane
from tests.unit.fleet.fake_workers import FakeConnection, FakeProcess, spec_of
from tests.virtual_time import on_virtual_time, within


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


@asynccontextmanager
async def staged(**options: Any) -> AsyncIterator[Stage]:
    """A stage beside its supervisor, which runs until the end of the block."""
    stage = Stage(**options)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stage.supervisor.run())
        yield stage
        running.cancel()


def acting(**options: Any) -> Callable[..., Any]:
    """Runs a test with a stage on virtual time."""
    return within(partial(staged, **options))


def fails(error: type[Exception], match: str | None = None, **raised: Any) -> AbstractContextManager[Any]:
    return pytest.RaisesGroup(pytest.RaisesExc(error, match=match, **raised))


def pauses(stage: Stage) -> list[float]:
    """Returns the seconds from each start of the worker to the next one."""
    spawned = [at for at, event in stage.events if event.startswith("spawn")]
    return [round(later - earlier, 3) for earlier, later in pairwise(spawned)]


async def caught(call: Awaitable[None]) -> str:
    with pytest.raises(PeerLost) as lost:
        await call
    return str(lost.value)


@acting()
async def test_a_dead_worker_is_restarted_after_a_growing_pause(stage: Stage) -> None:
    for _ in range(4):
        await stage.wait_for_live()
        stage.supervisor.progressed()
        await stage.kill()
        assert stage.connections[-1].reason == "killed by SIGKILL", "outstanding calls fail with the cause of death"
        assert stage.worker.status == "echo0.0 does not answer: killed by SIGKILL"
    await stage.wait_for_live()
    assert pauses(stage) == [0.5, 1, 2, 4]
    assert [event for _, event in stage.events][:6] == [
        "spawn echo0.0-0-0",
        "started echo0.0-0-0",
        "lost echo0.0-0-0",
        "clean up echo0.0-0-0",
        "cleaned up echo0.0-0-0",
        "spawn echo0.0-0-1",
    ]


@pytest.mark.parametrize(
    ("lived", "worked", "expected"),
    [
        ((0, 0, 0, supervisor.LONG_LIFE, 0), 0, [0.5, 1, 2, supervisor.LONG_LIFE + 0.5, 1]),
        ((0, 0, 0, 0), 3, [0.5, 1, 0.5, 1]),
    ],
)
@acting()
async def test_a_worker_that_lived_long_or_answered_work_is_restarted_as_if_it_had_never_died(
    stage: Stage, lived: tuple[float, ...], worked: int, expected: list[float]
) -> None:
    """worked: the number of the instance that did."""
    for number, seconds in enumerate(lived, start=1):
        await stage.wait_for_live()
        await asyncio.sleep(seconds)
        stage.worker.has_worked = number == worked
        stage.supervisor.progressed()
        await stage.kill()
    await stage.wait_for_live()
    assert pauses(stage) == expected


HANG = EndpointSpec("hang", ONE_OF, Lane.WORK, Idempotent.NO, False)


@pytest.mark.parametrize("dies", [True, False])
@acting()
async def test_the_cause_of_a_loss_is_the_death_that_the_kernel_knows_or_else_the_broken_link(
    stage: Stage, dies: bool
) -> None:
    await stage.wait_for_live()
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(caught(stage.worker.call(HANG, (), 60.0)))
        await asyncio.sleep(1)
        stage.connections[0].fail("a gap in the numbers")
        assert not stage.worker.alive
        await asyncio.sleep(0.3)
        if dies:
            stage.processes[0].die("exited with status 3")
    cause = "exited with status 3" if dies else "a gap in the numbers"
    assert call.result() == f"echo0.0-0-0: {cause}"
    assert stage.reasons == [cause]
    await stage.wait_for_live()
    assert stage.processes[0].requests == ([] if dies else ["stop"]), "the worker behind a broken link is ended"


@pytest.mark.parametrize(
    ("alone", "others", "ends"), [(True, (), False), (True, (8,), True), (False, (), True), (False, None, True)]
)
@on_virtual_time
async def test_six_deaths_without_a_finished_group_end_the_fleet_unless_one_suspect_is_tested(
    alone: bool, others: tuple[int, ...] | None, ends: bool
) -> None:
    """Deaths of a worker that worked for group 7; they count when others were there, or 7 is no suspect. None: it
    worked for no group."""
    failed = fails(FleetFailed, "echo0.0 died 6 times .* Resume with: asyncrl run")
    with failed if ends else nullcontext():
        async with staged() as stage:
            if alone:
                stage.isolated[7] = frozenset()
            if others is not None:
                stage.worker.groups_at = lambda instance: [7, *others]
            for _ in range(supervisor.MAX_DEATHS if ends else supervisor.MAX_DEATHS + 2):
                await stage.wait_for_live()
                await stage.kill()
            if ends:
                await asyncio.Event().wait()


@on_virtual_time
async def test_the_death_of_a_worker_that_cannot_be_restarted_ends_the_fleet_at_once() -> None:
    with fails(FleetFailed, check=lambda error: error.exit_code == 75):
        async with staged(restart=False) as stage:
            await stage.wait_for_live()
            await stage.kill()
            with pytest.raises(FleetFailed, match="killed by SIGKILL"):
                await stage.wait_for_live()
            await asyncio.Event().wait()


async def slow(_: int) -> None:
    await asyncio.sleep(50)


@acting(start=slow)
async def test_a_slow_start_is_no_death(stage: Stage) -> None:
    await stage.supervisor.all_started.wait()
    assert (asyncio.get_running_loop().time(), len(stage.processes)) == (50, 1)


@on_virtual_time
async def test_a_worker_that_lives_but_never_greets_ends_the_fleet() -> None:
    with fails(FleetFailed, "it hung up"):
        async with staged(greets=False) as stage, asyncio.timeout(60):
            await stage.supervisor.all_started.wait()


async def never_at_first(instances: int) -> None:
    if instances == 1:
        await asyncio.Event().wait()


@acting(start=never_at_first)
async def test_a_worker_that_dies_while_it_starts_is_lost(stage: Stage) -> None:
    await asyncio.sleep(1)
    stage.processes[0].die("killed by SIGSEGV")
    await stage.wait_for_live()
    assert stage.reasons == ["killed by SIGSEGV"]


@on_virtual_time
async def test_leaving_stops_and_cleans_up_all_workers() -> None:
    async with staged() as stage:
        await stage.wait_for_live()
        assert stage.instances == ["echo0.0-0-0"]
    assert stage.processes[0].requests == ["stop"]
    assert [event for _, event in stage.events[-2:]] == ["clean up echo0.0-0-0", "cleaned up echo0.0-0-0"]
    assert not stage.instances


@acting()
async def test_a_worker_that_is_started_again_elsewhere_is_in_another_fault_domain(stage: Stage) -> None:
    stage.hosts = [HostId("a"), HostId("b"), HostId("c")]
    for domain in ("a", "b"):
        await stage.wait_for_live()
        assert stage.worker.host.fault_domain == domain
        await stage.kill()


@acting()
async def test_a_worker_whose_host_left_does_not_count_as_dead(stage: Stage) -> None:
    for _ in range(2 * supervisor.MAX_DEATHS):
        await stage.wait_for_live()
        stage.processes[-1].has_left = True
        await stage.kill()
    await stage.wait_for_live()
    assert stage.left == 2 * supervisor.MAX_DEATHS


class NeverLauncher:
    """Waits for a host that does not come."""

    async def spawn(self, spec: WorkerSpec) -> FakeProcess:
        await asyncio.Event().wait()
        raise AssertionError

    def clean_up(self, spec: WorkerSpec) -> None:
        raise AssertionError


@on_virtual_time
async def test_a_fleet_begins_without_the_workers_that_may_join_later() -> None:
    stage = Stage()
    late = Replicas("late", 1, Layout())
    never = WorkerSlot(late.worker(0, 0), late, stage._make_spec, NeverLauncher(), restart=True, is_awaited=False)
    stage.supervisor._slots.append(never)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stage.supervisor.run())
        await stage.supervisor.all_started.wait()
        running.cancel()


@on_virtual_time
async def test_a_worker_that_does_not_listen_is_ended_within_ten_seconds() -> None:
    process = FakeProcess(spec_of("echo0.0-0-0"), ignores=("stop", "terminate"))
    await end_worker(process)
    assert process.requests == ["stop", "terminate", "kill"]
    assert asyncio.get_running_loop().time() < 10


@pytest.mark.parametrize(("works_for", "is_drained"), [(5.0, 1), (30.0, 0)])
@acting()
async def test_an_instance_that_is_to_leave_ends_when_its_work_or_its_time_does(
    stage: Stage, works_for: float, is_drained: int
) -> None:
    await stage.wait_for_live()
    began = asyncio.get_running_loop().time()
    (replica,) = stage.workers.replicas
    with replica:  # A call that chose it runs there.
        assert stage.supervisor.retire(stage.worker.instance, 20.0)
        assert (replica.free, replica.alive) == (False, True)
        with suppress(TimeoutError):
            async with asyncio.timeout(works_for):
                await stage.connections[-1].lost.wait()
    await stage.connections[-1].lost.wait()
    assert asyncio.get_running_loop().time() - began == pytest.approx(min(works_for, 20), abs=0.2)
    await stage.wait_for_live()
    assert replica.free, "the next instance takes calls"
    assert (stage.left, stage.drained) == (1, is_drained)
    assert stage.processes[0].requests == ["stop"]
    assert not stage.supervisor.retire("echo0.0-0-0", 1.0), "it is gone"


# ---- which deaths of a worker end the run, and how long its restart waits ------------------------------------------


def counter_after(deaths: int, *suspects: int) -> DeathCounter:
    """Returns a counter after so many deaths beside others, and one of a worker that each of the suspects had alone."""
    counter = DeathCounter()
    for number, suspect in enumerate((*([None] * deaths), *suspects)):
        counter.count(f"instance {number}", 0.0, suspect)
    return counter


@pytest.mark.parametrize(
    ("deaths", "suspects", "unexplained"),
    [
        (2, (), 2),
        (2, (7, 7, 7), 2),
        (2, (7, 7, 7, 8, 8), 4),  # A second suspect: whatever the worker does, it dies.
        (1, (7,) * (supervisor.MAX_TESTED + 2), 3),
        (supervisor.MAX_DEATHS, (7,), supervisor.MAX_DEATHS),
    ],
)
def test_deaths_of_the_one_suspect_that_had_the_worker_alone_do_not_count(
    deaths: int, suspects: tuple[int, ...], unexplained: int
) -> None:
    counter = counter_after(deaths, *suspects)
    assert counter.unexplained == unexplained
    assert counter.is_too_often == (unexplained >= supervisor.MAX_DEATHS)
    counter.progressed()
    assert counter.unexplained == 0


@given(st.lists(st.sampled_from(["progress", 0.0, supervisor.LONG_LIFE - 1, supervisor.LONG_LIFE]), max_size=40))
def test_pauses_grow_with_short_lives_and_stay_bounded(events: list[str | float]) -> None:
    """A number: a death after so many seconds of life; else a finished group."""
    deaths = DeathCounter()
    now = 0.0
    since = 0
    pause = supervisor.FIRST_PAUSE / 2
    for number, lived in enumerate(events):
        since = 0 if isinstance(lived, str) else since + 1
        if isinstance(lived, str):
            deaths.progressed()
        else:
            deaths.started_at = now
            now += lived
            assert deaths.count(f"instance {number}", now)
            assert not deaths.count(f"instance {number}", now)
            pause = (
                supervisor.FIRST_PAUSE if lived >= supervisor.LONG_LIFE else min(2 * pause, supervisor.LONGEST_PAUSE)
            )
            assert deaths.pause_of(supervisor.LONGEST_PAUSE) == pause
            assert deaths.is_too_often == (since >= supervisor.MAX_DEATHS)


@acting(restart=False)
async def test_a_return_waits_for_the_death_of_a_worker_that_was_killed_because_it_hung(stage: Stage) -> None:
    stage.supervisor.learners = learners = Learners()
    running: Any = SimpleNamespace(supervisor=stage.supervisor)
    await stage.wait_for_live()
    assert await why_lost(running) is None, "it lives, so a failed call has another cause"
    stage.processes[0].kill = lambda: None
    stage.supervisor.kill(stage.worker.instance)
    assert stage.worker.alive, "the kernel takes its time"
    waiting = asyncio.ensure_future(why_lost(running))
    await asyncio.sleep(0)
    await stage.kill()
    assert await waiting == "echo0.0 died: killed by SIGKILL"
    learners.start_again()
    assert not learners.killed
    await asyncio.sleep(0)
    await stage.wait_for_live()
