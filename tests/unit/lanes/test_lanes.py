"""Lanes of one worker under load: what is small and urgent overtakes a thousand calls. Order of events, no clock."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from asyncrl.config.schema import Config, ModelConfig, TaskConfig
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.fleet.worker.worker_runtime import run_worker
from asyncrl.fleet.worker.worker_spec import Addresses, RunFacts, WorkerSpec
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import CREDIT, InprocWire
from asyncrl.protocols.distribute_collect import ONE_OF, ONE_TO_ALL
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Contract, Lane, endpoint

CALLS = 1000


class Queue(Contract):
    @endpoint(ONE_OF)
    async def work(self) -> int:
        raise NotImplementedError

    @endpoint(ONE_OF, stream=True)
    def items(self) -> AsyncIterator[int]:
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def pause(self) -> int:
        """How many work calls have begun."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def aborted(self) -> int:
        """Answers once a stream was closed."""
        raise NotImplementedError


class QueueService(Service, Queue):
    """Work calls wait for one another's turn, which `may_run` gives."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.begun = 0
        self.may_run = asyncio.Event()
        self.closed = asyncio.Event()

    @property
    def queued(self) -> int:
        return self.begun

    async def work(self) -> int:
        self.begun += 1
        await self.may_run.wait()
        return self.begun

    async def items(self) -> AsyncIterator[int]:
        try:
            yield 0
            await asyncio.Event().wait()
        finally:
            self.closed.set()

    async def pause(self) -> int:
        return self.begun

    async def aborted(self) -> int:
        await self.closed.wait()
        return self.begun


@dataclass
class Site:
    """A worker of this loop, and links to it."""

    wire: InprocWire
    spec: WorkerSpec
    service: QueueService
    calls: list["asyncio.Task[int]"] = field(default_factory=list)

    def link(self, lane: Lane, caller: str) -> Client:
        hello = self.spec.facts.hello("controller", 0, caller)
        return Client(self.wire.connect(getattr(self.spec.addresses, lane.value)), hello, "queue")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    made: list[QueueService] = []

    def implementation(context: WorkerContext) -> QueueService:
        made.append(QueueService(context))
        return made[0]

    config = Config(model=ModelConfig(name="none"), task=TaskConfig(prompts="none"))
    facts = RunFacts("feedbeef", tmp_path, tmp_path, 0, "none", config)
    addresses = Addresses("inproc://control", "inproc://work", "inproc://data")
    spec = WorkerSpec("queue", 0, 0, Layout(), "queue0.0-0-1", implementation, addresses, facts)
    wire = InprocWire()
    stop = asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(run_worker(spec, wire, stop))
        await until(lambda: bool(made))
        yield Site(wire, spec, made[0])
        stop.set()
    wire.close()


@asynccontextmanager
async def thousand_calls(site: Site) -> AsyncIterator[None]:
    """Sent, on as many links as their credit asks for; whether they were taken is not waited for."""
    async with AsyncExitStack() as scope:
        tasks = await scope.enter_async_context(asyncio.TaskGroup())
        scope.callback(site.service.may_run.set)
        links = [
            await scope.enter_async_context(site.link(Lane.WORK, f"caller {number}"))
            for number in range(-(-CALLS // CREDIT))
        ]
        site.calls = [tasks.create_task(links[index // CREDIT].call("work", (), 50.0)) for index in range(CALLS)]
        yield
        site.service.may_run.set()
        await asyncio.gather(*site.calls)


async def until(condition: Callable[[], bool]) -> None:
    """Lets everybody else run until the condition holds; the fixture's deadline bounds it."""
    for _ in iter(condition, True):
        await asyncio.sleep(0)


async def test_pause_health_and_an_abort_are_answered_while_a_thousand_work_calls_wait(site: Site) -> None:
    async with (
        site.link(Lane.CONTROL, "controller") as control,
        site.link(Lane.WORK, "controller") as work,
        thousand_calls(site),
    ):
        await until(lambda: site.service.begun == CALLS)
        assert await control.call("pause", (), 5.0) == CALLS
        (health,) = await control.call("health", (), 5.0)
        assert health.queued == CALLS
        async with aclosing(work.stream("items", (), 5.0)) as items:
            assert await anext(items) == 0
        assert await control.call("aborted", (), 5.0) == CALLS
        assert not any(call.done() for call in site.calls)
    assert all(call.result() == CALLS for call in site.calls)


async def test_a_control_call_overtakes_work_calls_that_were_sent_before_it(site: Site) -> None:
    async with site.link(Lane.CONTROL, "controller") as control, thousand_calls(site):
        await until(lambda: site.service.begun > 0)
        begun = await control.call("pause", (), 5.0)
        assert begun < CALLS / 2, "the thousand were taken first"
        await until(lambda: site.service.begun == CALLS)
