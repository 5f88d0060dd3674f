"""A service behind its dispatchers, without a wire."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.schema import Config, ModelConfig, TaskConfig
from asyncrl.errors import ConfigError, LostRows, UnknownEndpoint
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.fleet.worker.worker_runtime import Dispatcher
from asyncrl.lanes.weights.handover import WeightHandover
from asyncrl.protocols.distribute_collect import ONE_OF
from asyncrl.protocols.messages import Call, PromptGroup
from asyncrl.protocols.service_contracts import Contract, Lane, endpoint
from asyncrl.telemetry.trace import Tracer
from tests.unit.services.conftest import worker_context as worker_context
from tests.virtual_time import on_virtual_time

GROUP = PromptGroup(7, 0, 0, "hello", (0,), 1, 0, 1.0, 8, deadline=30.0)


class Steps(Contract):
    @endpoint(ONE_OF)
    async def step(self, group: PromptGroup) -> int: ...

    @endpoint(ONE_OF, stream=True)
    def numbers(self) -> AsyncIterator[int]: ...


class StepsService(Service, Steps):
    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.may_start, self.may_step, self.closed = asyncio.Event(), asyncio.Event(), False

    async def start(self) -> None:
        await self.may_start.wait()
        if self.context.spec.options.get("refuses"):
            raise ConfigError("not like this")
        self.rows = self.context.open_rows(4, 64)

    async def step(self, group: PromptGroup) -> int:
        await self.may_step.wait()
        return group.id

    async def numbers(self) -> AsyncIterator[int]:
        try:
            for number in range(9):
                yield number
        finally:
            self.closed = True


@pytest.fixture
def make(worker_context: Callable[..., WorkerContext]) -> Callable[..., StepsService]:
    """Makes a service. may_start: whether it may at once."""
    config = Config(model=ModelConfig(name="m"), task=TaskConfig(prompts="p"))

    def steps(tasks: asyncio.TaskGroup, *, may_start: bool = True, **changes: Any) -> StepsService:
        service = StepsService(worker_context("steps", config, tasks, **changes))
        if may_start:
            service.may_start.set()
        return service

    return steps


Make = Callable[..., StepsService]


async def test_calls_wait_until_the_service_has_started_but_health_does_not(make: Make) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = make(tasks, may_start=False)
        work = Dispatcher(service, Lane.WORK)
        control = Dispatcher(service, Lane.CONTROL)
        service.may_step.set()
        starting = tasks.create_task(service.begin())
        stepping = tasks.create_task(work(Call(0, "step", (GROUP,), 5.0)))  # type: ignore[arg-type]
        (health,) = await control(Call(0, "health", (), 5.0))  # type: ignore[misc]
        assert health.doing == ("starting",)
        assert not stepping.done()
        service.may_start.set()
        await starting
        assert await stepping == 7


async def test_an_error_of_the_start_is_raised_by_started(make: Make) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = make(tasks, options={"refuses": True})
        await service.begin()
        with pytest.raises(ConfigError, match="not like this"):
            await Dispatcher(service, Lane.CONTROL)(Call(0, "started", (), 5.0))  # type: ignore[misc]


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_guest_starts_after_its_host(make: Make, refuses: bool) -> None:
    async with asyncio.TaskGroup() as tasks:
        handover = WeightHandover()
        guest = make(tasks, handover=handover)
        inner = guest.context.spec
        host = make(tasks, may_start=False, handover=handover, guest=inner, options={"refuses": refuses})
        starting = tasks.create_task(guest.begin())
        hosting = tasks.create_task(host.begin())
        await asyncio.sleep(0)
        assert not guest.ready.done()
        host.may_start.set()
        await asyncio.wait([starting, hosting])
        assert isinstance(host.ready.exception(), ConfigError) == refuses
        await guest.started()


async def test_a_call_on_the_wrong_lane_is_unknown(make: Make) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = make(tasks)
        with pytest.raises(UnknownEndpoint, match="no 'health' on its work lane"):
            Dispatcher(service, Lane.WORK)(Call(0, "health", (), 5.0))
        with pytest.raises(UnknownEndpoint, match="no 'start' on its control lane"):
            Dispatcher(service, Lane.CONTROL)(Call(0, "start", (), 5.0))


@on_virtual_time
async def test_a_call_is_shown_booked_and_traced(make: Make, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    async with asyncio.TaskGroup() as tasks:
        service = make(tasks, tracer=Tracer(trace, "steps0.0"))
        await service.begin()
        await asyncio.sleep(2)
        stepping = tasks.create_task(Dispatcher(service, Lane.WORK)(Call(0, "step", (GROUP,), 5.0)))
        await asyncio.sleep(3)
        (health,) = await service.health()
        assert health.doing == ("step (group 7) for 3.0 s",)
        service.may_step.set()
        await stepping
        (health,) = await service.health()
    assert health.doing == ()
    assert (health.seconds["starved"], health.seconds["overhead"]) == (2, 3)
    service.context.tracer.close()
    assert '"name":"step"' in trace.read_text()


async def test_a_stream_is_closed_with_its_call(make: Make) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = make(tasks)
        await service.begin()
        async with aclosing(Dispatcher(service, Lane.WORK)(Call(0, "numbers", (), 5.0))) as items:  # type: ignore[type-var]
            async for item in items:  # type: ignore[attr-defined]
                assert item == 0
                break
        assert service.closed
        assert (await service.health())[0].doing == ()


async def test_release_frees_the_rows_of_samples_in_these_attempts_and_earlier_ones(make: Make) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = make(tasks)
        await service.release([(0, 0, 0)], oldest=0)  # before there are rows
        service.may_start.set()
        await service.begin()
        assert service.rows is not None
        for attempt in (0, 2, 1):  # the last one was overtaken
            place = service.keep((5, 3, attempt), {"number": np.array([attempt], np.int64)})
        with pytest.raises(LostRows):
            service.rows.read(place, ["number"])
        await service.release([(5, 3, 1), (5, 2, 2), (6, 3, 0)], oldest=5)
        assert service.rows.used == 1
        await service.release([(5, 3, 2), (5, 3, 2)], oldest=5)
        assert service.rows.used == 0


async def test_rows_of_groups_that_are_over_are_freed_unnamed(make: Make) -> None:
    """They were made when their caller had given up already. Groups below 0 are of another count."""
    async with asyncio.TaskGroup() as tasks:
        service = make(tasks)
        await service.begin()
        assert service.rows is not None
        for group in (-1, 3, 4, 5):
            service.keep((group, 0, 0), {"number": np.array([group], np.int64)})
        await service.release([], oldest=5)
        assert service.rows.used == 2


@on_virtual_time
async def test_idle_time_is_booked_as_told(make: Make) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = make(tasks)
        await asyncio.sleep(1)
        await service.idle_because("blocked")
        await asyncio.sleep(3)
        seconds = (await service.health())[0].seconds
        assert (seconds["starved"], seconds["blocked"]) == (1, 3)
        with pytest.raises(ValueError, match="'asleep' is no state"):
            await service.idle_because("asleep")
