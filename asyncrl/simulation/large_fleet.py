"""A fleet of many workers on virtual time, whose samples in flight fill it: what the controller does for each is real.

    controller ── the real handles, connections and codec ── in-process wire ── workers with fake services

`run_large_fleet` tells the callbacks of the event loop that belong to workers from those that belong to the controller,
so that a benchmark can time the controller alone, and a test can count what it executes.
"""

import gc
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config, ModelConfig, TaskConfig
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.observers.events import Event
from asyncrl.controller.training_run import WorkerEvents
from asyncrl.fleet.fleet import Platform, RunningFleet, ServiceSpec, fleet_on
from asyncrl.fleet.launching.launcher import InprocWorker
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.fleet.worker.worker_runtime import run_worker
from asyncrl.fleet.worker.worker_spec import Addresses, RunFacts, WorkerSpec
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.protocols.batch import Batch, BatchRef
from asyncrl.protocols.service_contracts import Generation, Reference, Reward, Training
from asyncrl.simulation.fakes.fake_service import quiet
from asyncrl.simulation.fakes.generation import FakeGeneration, Lengths, constant
from asyncrl.simulation.fakes.scoring import FakeReference, FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from asyncrl.simulation.resumable_run import ResumableRun, RunShape
from asyncrl.simulation.virtual_loop import VirtualLoop, run

TOKEN_TIME = 0.1
ROWS_AT_ONCE = 128
"""Rows that the trainer reads in one go; more are copied in a thread, which virtual time does not wait for."""
DEADLINE = 1e5

on_a_worker: ContextVar[bool] = ContextVar("on_a_worker", default=False)


@dataclass(frozen=True, slots=True)
class LargeFleet(RunShape):
    """Describes the fleet and the run; with one trainer besides. references: 0 without the service. step_time: seconds
    of a step. lengths: of completions; where they are all the same, the samples of a group go in one call."""

    generators: int = 8
    scorers: int = 4
    references: int = 0
    step_time: float = 0.0
    lengths: Lengths = field(default_factory=lambda: constant(30))

    @property
    def all_slots(self) -> int:
        """Slots of all generators: none of them keeps a sample waiting."""
        return 0

    @property
    def row_slots(self) -> int:
        """Rows that one of the workers may store: four times its share, for calls are not spread quite evenly."""
        return 4 * self.gate.row_slots // min(self.generators, self.references or self.generators) + 64


class _SmallRows:
    """Stores short rows, as many as one worker of many has to. shape: of the run."""

    shape: LargeFleet
    row_bytes = 512

    @property
    def row_slots(self) -> int:
        return self.shape.row_slots


class LargeGeneration(_SmallRows, FakeGeneration):
    def __init__(self, shape: LargeFleet, context: WorkerContext) -> None:
        self.shape = shape
        slots = shape.gate.cap * shape.members
        FakeGeneration.__init__(self, slots, TOKEN_TIME, shape.lengths, context=context)


class LargeReference(_SmallRows, FakeReference):
    def __init__(self, shape: LargeFleet, context: WorkerContext) -> None:
        self.shape = shape
        FakeReference.__init__(self, 0.1, context=context)

    async def read_checked(self, samples: BatchRef, columns: Sequence[str]) -> Batch:
        """Reads nothing: a connection from each reference worker to each generator is no work of the controller."""
        return Batch({})


class LargeTraining(FakeTraining):
    def __init__(self, shape: LargeFleet, context: WorkerContext) -> None:
        super().__init__(StepCost(shape.step_time), shape.enforced_limit, context=context)

    async def prefetch(self, samples: BatchRef) -> list[bool]:
        return [False] * len(samples)

    async def read(self, samples: BatchRef, columns: Sequence[str]) -> Batch:
        starts = range(0, len(samples), ROWS_AT_ONCE)
        parts = [samples.take(range(start, min(start + ROWS_AT_ONCE, len(samples)))) for start in starts]
        return Batch.join([await self.context.reader.read(part, columns) for part in parts])


class _Launcher:
    """Runs workers as tasks that are marked as no part of the controller."""

    def __init__(self, wire: InprocWire) -> None:
        self._wire = wire

    async def spawn(self, spec: WorkerSpec) -> InprocWorker:
        spec = replace(spec, addresses=Addresses.inproc(spec.instance))

        def sever() -> None:
            for address in (spec.addresses.control, spec.addresses.work, spec.addresses.data):
                self._wire.sever(address)

        mark = on_a_worker.set(True)
        try:
            return InprocWorker(spec, lambda stop: run_worker(spec, self._wire, stop, quiet), sever)
        finally:
            on_a_worker.reset(mark)

    def clean_up(self, spec: WorkerSpec) -> None:
        """Leaves nothing behind."""


class WatchedLoop(VirtualLoop):
    """Runs each callback of the controller inside `controller_scope`, once that is set."""

    controller_scope: Callable[[Callable[..., object], tuple[Any, ...]], None] | None = None

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_soon(self._run_callback, callback, args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_at(when, self._run_callback, callback, args, context=context)

    def _run_callback(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self.controller_scope is None or on_a_worker.get():
            callback(*args)
        else:
            self.controller_scope(callback, args)


class LargeRun(ResumableRun):
    """Runs the controller on the fleet. observe: takes every event. most_in_flight: samples, at any event."""

    fleet: RunningFleet

    def __init__(self, shape: LargeFleet, observe: Callable[[Event], None]) -> None:
        self.shape = shape
        self.most_in_flight = 0
        self.events = 0
        self._observe_run = observe
        self._wire = InprocWire()
        self.store = MemoryStore()
        super().__init__(shape, self.store, lambda: None, thorough=False)

    def rows_to_save(self) -> BatchRef:
        """Returns no sample: no run of this fleet is resumed, and what is counted is the work of its steps."""
        return BatchRef(())

    async def run(self) -> None:
        shape = self.shape
        config = Config(model=ModelConfig(name="none"), task=TaskConfig(prompts="none"))
        nowhere = Path("/nowhere")
        facts = RunFacts("feedbeef", nowhere, nowhere, 0, "none", config)
        names = iter(range(1 << 32))
        launcher = _Launcher(self._wire)
        platform = Platform(self._wire, lambda _: launcher, lambda: f"{next(names):08x}", lambda _: None)
        specs = [
            ServiceSpec("generation", Generation, partial(LargeGeneration, shape), shape.generators),
            ServiceSpec("reward", Reward, lambda context: FakeReward(0.1, context=context), shape.scorers),
            ServiceSpec("training", Training, partial(LargeTraining, shape)),
        ]
        if shape.references:
            specs.append(ServiceSpec("reference", Reference, partial(LargeReference, shape), shape.references))
        async with fleet_on(platform, specs, facts, report=lambda _: None, resume="the same") as fleet:
            self.fleet = fleet
            self.make_controller(fleet.fleet, DEADLINE, self._observe, fleet.supervisor.kill)
            await self.run_controller({"worker events": WorkerEvents(fleet, self.controller).follow()})

    def _observe(self, event: Event) -> None:
        self.events += 1
        self.most_in_flight = max(self.most_in_flight, self.gate.in_flight)
        self._observe_run(event)


def run_large_fleet(shape: LargeFleet, observe: Callable[[Event], None]) -> LargeRun:
    """Runs to the last step on a virtual loop of its own. Raises AssertionError when gate and journal do not agree.

    The collector of garbage is off, because it would scan the objects of all workers."""

    async def main() -> LargeRun:
        large = LargeRun(shape, observe)
        await large.run()
        return large

    gc.collect()
    gc.disable()
    try:
        return run(main(), WatchedLoop)
    finally:
        gc.enable()
