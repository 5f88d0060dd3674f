"""A service behind its dispatchers, without a wire."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

from asyncrl.config.schema import Config, ModelConfig, TaskConfig
from asyncrl.errors import ConfigError, LostRows, UnknownEndpoint
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.fleet.worker.worker_runtime import Dispatcher
from asyncrl.fleet.worker.worker_spec import Addresses, RunFacts, WorkerSpec
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.lanes.weights.handover import WeightHandover
from asyncrl.protocols.distribute_collect import ONE_OF
from asyncrl.protocols.messages import Call, PromptGroup
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Contract, Lane, endpoint
from asyncrl.telemetry.state_clock import Occupancy, StateClock
from asyncrl.telemetry.trace import Tracer

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


class Hand:
    time = 0.0

    def __call__(self) -> float:
        return self.time


def context_of(tmp_path: Path, tasks: asyncio.TaskGroup, hand: Hand, **options: Any) -> WorkerContext:
    clock = StateClock(hand)
    occupancy = Occupancy(clock)
    config = Config(model=ModelConfig(name="m"), task=TaskConfig(prompts="p"))
    instance = "steps0.0-0-a"
    facts = RunFacts("feedbeef", tmp_path, tmp_path, 0, "none", config)
    spec = WorkerSpec("steps", 0, 0, Layout(), instance, StepsService, Addresses.inproc(instance), facts, options)
    return WorkerContext(
        spec=spec,
        reader=SimpleNamespace(bytes_read=0),  # type: ignore[arg-type]
        compute=ThreadCompute(occupancy),
        clock=clock,
        occupancy=occupancy,
        tracer=Tracer(tmp_path / "logs" / f"{instance}.trace.jsonl", "steps0.0"),
        log=structlog.get_logger(),
        tasks=tasks,
        open_rows=lambda slots, row_bytes: RowStore.private(f"inproc://{instance}.data", slots, row_bytes),
    )


async def test_calls_wait_until_the_service_has_started_but_health_does_not(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = StepsService(context_of(tmp_path, tasks, Hand()))
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


async def test_an_error_of_the_start_is_raised_by_started(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = StepsService(context_of(tmp_path, tasks, Hand(), refuses=True))
        service.may_start.set()
        await service.begin()
        with pytest.raises(ConfigError, match="not like this"):
            await Dispatcher(service, Lane.CONTROL)(Call(0, "started", (), 5.0))  # type: ignore[misc]


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_guest_starts_after_its_host(tmp_path: Path, refuses: bool) -> None:
    async with asyncio.TaskGroup() as tasks:
        handover = WeightHandover()
        inner = replace(context_of(tmp_path, tasks, Hand()), handover=handover)
        outer = replace(context_of(tmp_path, tasks, Hand(), refuses=refuses), handover=handover)
        guest = StepsService(inner)
        host = StepsService(replace(outer, spec=replace(outer.spec, guest=inner.spec)))
        guest.may_start.set()
        starting = tasks.create_task(guest.begin())
        hosting = tasks.create_task(host.begin())
        await asyncio.sleep(0)
        assert not guest.ready.done()
        host.may_start.set()
        await asyncio.wait([starting, hosting])
        assert isinstance(host.ready.exception(), ConfigError) == refuses
        await guest.started()


async def test_a_call_on_the_wrong_lane_is_unknown(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = StepsService(context_of(tmp_path, tasks, Hand()))
        with pytest.raises(UnknownEndpoint, match="no 'health' on its work lane"):
            Dispatcher(service, Lane.WORK)(Call(0, "health", (), 5.0))
        with pytest.raises(UnknownEndpoint, match="no 'start' on its control lane"):
            Dispatcher(service, Lane.CONTROL)(Call(0, "start", (), 5.0))


async def test_a_call_is_shown_booked_and_traced(tmp_path: Path) -> None:
    hand = Hand()
    async with asyncio.TaskGroup() as tasks:
        service = StepsService(context_of(tmp_path, tasks, hand))
        service.may_start.set()
        await service.begin()
        hand.time = 2
        stepping = tasks.create_task(Dispatcher(service, Lane.WORK)(Call(0, "step", (GROUP,), 5.0)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        hand.time = 5
        (health,) = await service.health()
        assert health.doing == ("step (group 7) for 0.0 s",)
        service.may_step.set()
        await stepping
        (health,) = await service.health()
    assert health.doing == ()
    assert (health.seconds["starved"], health.seconds["overhead"]) == (2, 3)
    service.context.tracer.close()
    assert '"name":"step"' in (tmp_path / "logs" / "steps0.0-0-a.trace.jsonl").read_text()


async def test_a_stream_is_closed_with_its_call(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = StepsService(context_of(tmp_path, tasks, Hand()))
        service.may_start.set()
        await service.begin()
        async with aclosing(Dispatcher(service, Lane.WORK)(Call(0, "numbers", (), 5.0))) as items:  # type: ignore[type-var]
            async for item in items:  # type: ignore[attr-defined]
                assert item == 0
                break
        assert service.closed
        assert (await service.health())[0].doing == ()


async def test_release_frees_the_rows_of_samples_in_these_attempts_and_earlier_ones(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = StepsService(context_of(tmp_path, tasks, Hand()))
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


async def test_rows_of_groups_that_are_over_are_freed_unnamed(tmp_path: Path) -> None:
    """They were made when their caller had given up already. Groups below 0 are of another count."""
    async with asyncio.TaskGroup() as tasks:
        service = StepsService(context_of(tmp_path, tasks, Hand()))
        service.may_start.set()
        await service.begin()
        assert service.rows is not None
        for group in (-1, 3, 4, 5):
            service.keep((group, 0, 0), {"number": np.array([group], np.int64)})
        await service.release([], oldest=5)
        assert service.rows.used == 2


async def test_idle_time_is_booked_as_told(tmp_path: Path) -> None:
    hand = Hand()
    async with asyncio.TaskGroup() as tasks:
        service = StepsService(context_of(tmp_path, tasks, hand))
        hand.time = 1
        await service.idle_because("blocked")
        hand.time = 4
        seconds = (await service.health())[0].seconds
        assert (seconds["starved"], seconds["blocked"]) == (1, 3)
        with pytest.raises(ValueError, match="'asleep' is no state"):
            await service.idle_because("asleep")
