"""The services of a run: their handles for algorithms, and how they are started, connected, kept alive and stopped."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from asyncrl.errors import FleetFailed, PeerLost, root_cause
from asyncrl.fleet.handle import make_handle
from asyncrl.fleet.hang_detection import HangDetection, round_seconds
from asyncrl.fleet.health_poller import HealthPoller
from asyncrl.fleet.inproc_launcher import InprocLauncher
from asyncrl.fleet.launcher import Launcher
from asyncrl.fleet.lifecycle_events import (
    FleetEvent,
    FleetStalled,
    WorkerCleanedUp,
    WorkerHung,
    WorkerLost,
    WorkerSpawned,
)
from asyncrl.fleet.replicas import DEATH_NOTICE, RemoteWorker, Replicas
from asyncrl.fleet.stall_watchdog import StallWatchdog
from asyncrl.fleet.supervisor import STOP_STAGES, RunningInstance, Supervisor, WorkerSlot
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.worker_spec import Origin, RunFacts, WorkerSpec
from asyncrl.fleet.worker_connection import WorkerConnection
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.inproc_wire import InprocWire
from asyncrl.lanes.control.wire import Wire, WireByScheme
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.shared_memory import unlink_run_segments
from asyncrl.protocols.contracts import Contract, Critic, Generation, Reference, Reward, Training
from asyncrl.protocols.layout import Layout
from asyncrl.telemetry.run_directory import replace_text

if TYPE_CHECKING:
    from asyncrl.fleet.worker.worker_spec import Implementation

C = TypeVar("C", bound=Contract)
RecordInstances = Callable[[Mapping[str, RunningInstance]], None]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The services of a training run: handles typed by contracts, or the services themselves.

    reference: None without a KL term. evaluation: None without held-out prompts. critic, cost, cost_critic: None when
    the algorithm has none.
    """

    generation: Generation
    reward: Reward
    training: Training
    reference: Reference | None = None
    evaluation: Generation | None = None
    critic: Critic | None = None
    cost: Reward | None = None
    cost_critic: Critic | None = None


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A service to run.

    implementation: "module:Class". here: whether it runs inside this process; then implementation may be any callable.
    options: plain values that the service finds in its context. origin: what its processes are forked from.
    """

    name: str
    contract: type[Contract]
    implementation: "Implementation"
    replicas: int = 1
    layout: Layout = field(default_factory=Layout)
    options: Mapping[str, Any] = field(default_factory=dict)
    here: bool = False
    origin: Origin = "plain"

    @property
    def restart(self) -> bool:
        """Returns whether a dead worker is restarted. Trainer and critic are not: what they have learnt dies with
        them."""
        return not issubclass(self.contract, Training | Critic)


class RunningFleet:
    """A started fleet: handles by service, the workers behind them, and the events of workers.

    Attributes:
        workers: by service.
        subscribers: functions that get every FleetEvent; they must not block. Workers that started before the fleet
            was handed over are not reported again.
        describe_algorithm: returns lines about the algorithm for the stall watchdog.
        health_poller: asks workers for their health.
    """

    health_poller: HealthPoller
    supervisor: Supervisor

    def __init__(
        self, facts: RunFacts, specs: Sequence[ServiceSpec], report: Callable[[str], None], record: RecordInstances
    ) -> None:
        self.facts = facts
        self.restarted = [spec.name for spec in specs if spec.restart]
        self.critics = [spec.name for spec in specs if issubclass(spec.contract, Critic)]
        self.workers = {spec.name: Replicas(spec.name, spec.replicas, spec.layout) for spec in specs}
        self.subscribers: list[Callable[[FleetEvent], None]] = []
        self.describe_algorithm: Callable[[], Sequence[str]] = tuple
        self._report = report
        self._record = record
        deadline = facts.config.fleet.call_deadline
        self._handles = {spec.name: make_handle(spec.contract, self.workers[spec.name], deadline) for spec in specs}

    def handle(self, service: str, contract: type[C]) -> C:
        """Returns the handle on a service, typed by its contract."""
        return cast(C, self._handles[service])

    @property
    def fleet(self) -> Fleet:
        """The services of a training run. Raises KeyError when generation, reward or training is missing."""
        get = self._handles.get
        return Fleet(
            generation=self.handle("generation", Generation),
            reward=self.handle("reward", Reward),
            training=self.handle("training", Training),
            reference=cast(Reference | None, get("reference")),
            evaluation=cast(Generation | None, get("evaluation")),
            critic=cast(Critic | None, get("critic")),
            cost=cast(Reward | None, get("cost")),
            cost_critic=cast(Critic | None, get("cost_critic")),
        )

    @property
    def all_alive(self) -> bool:
        """Returns whether every worker takes calls."""
        return all(worker.alive for replicas in self.workers.values() for worker in replicas)

    def progressed(self) -> None:
        """Notes a finished group: deaths so far do not end the run."""
        self.supervisor.progressed()

    def kill(self, instance: str) -> None:
        """Kills an instance that holds up others; its worker is restarted."""
        self.supervisor.kill(instance)

    def emit(self, event: FleetEvent) -> None:
        """Acts on an event, reports what a person should read, and passes the event to all subscribers."""
        match event:
            case WorkerSpawned() | WorkerCleanedUp():
                self._record(self.supervisor.instances)
            case WorkerLost(service, instance, reason) if service in self.restarted:
                self._report(f"lost {instance}: {reason}; it is started again")
            case WorkerHung(service, instance, seconds):
                effect = "it is killed and started again" if service in self.restarted else "it is killed: the run ends"
                self._report(f"{instance} has answered no call for {seconds:.0f} s, not even for its health; {effect}")
                self.kill(instance)
            case FleetStalled(description):
                self._report(description)
        for notify in self.subscribers:
            notify(event)


def write_fleet_file(path: Path, instances: Mapping[str, RunningInstance]) -> None:
    """Writes {"workers": [{service, replica, rank, pid, address}]}; readers see the old file or the new one."""
    workers = [
        {
            "service": each.spec.service,
            "replica": each.spec.replica,
            "rank": each.spec.rank,
            "pid": each.process.pid,
            "address": each.spec.addresses.control,
        }
        for _, each in sorted(instances.items())
    ]
    replace_text(path, json.dumps({"workers": workers}, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Platform:
    """The machine that a fleet runs on, real or simulated.

    launcher: of the workers of a service. unique_id: returns 8 new hex digits at each call. record: takes the running
    instances whenever they change.
    """

    wire: Wire
    launcher: Callable[[ServiceSpec], Launcher]
    unique_id: Callable[[], str]
    record: RecordInstances


@asynccontextmanager
async def running_fleet(
    specs: Sequence[ServiceSpec],
    facts: RunFacts,
    *,
    launcher: Launcher | None = None,
    report: Callable[[str], None] = print,
    resume: str = "the same command",
) -> AsyncIterator[RunningFleet]:
    """Starts all workers in parallel, waits until all take calls, keeps them alive, and stops them at the end.

    Args:
        launcher: starts the workers of services that are not `here`; None: all of them run in this process.
        report: takes what a person should read: a worker that was lost and is started again, or hangs, and the text of
            the stall watchdog.
        resume: the command that resumes the run.

    Raises:
        FleetFailed: trainer or critic died, or another worker too often; raised out of the block too, whose tasks are
            cancelled first.
        AsyncrlError: what a worker raised while it started.
    """
    async with AsyncExitStack() as scope:
        scope.callback(unlink_run_segments, facts.run)  # Workers that were killed left theirs.
        inproc = InprocWire()
        wire = WireByScheme(inproc, ZmqWire(CurveKeys(*facts.curve) if facts.curve else None))
        scope.callback(wire.close)
        here = await scope.enter_async_context(InprocLauncher(wire, inproc, ThreadCompute))
        platform = Platform(
            wire,
            lambda spec: here if spec.here or launcher is None else launcher,
            lambda: secrets.token_hex(4),
            partial(write_fleet_file, Path(facts.run_dir) / "fleet.json"),
        )
        yield await scope.enter_async_context(fleet_on(platform, specs, facts, report=report, resume=resume))


@asynccontextmanager
async def fleet_on(
    platform: Platform, specs: Sequence[ServiceSpec], facts: RunFacts, *, report: Callable[[str], None], resume: str
) -> AsyncIterator[RunningFleet]:
    """Does what `running_fleet` does, on any platform."""
    running = RunningFleet(facts, specs, report, platform.record)
    slots = [
        WorkerSlot(
            worker, partial(_next_instance, spec, worker, facts, platform), platform.launcher(spec), spec.restart
        )
        for spec in specs
        for worker in running.workers[spec.name]
    ]
    deadline = facts.config.fleet.start_deadline
    hello = facts.hello("controller", 0, f"controller-{facts.incarnation}-{platform.unique_id()}")

    def connect(spec: WorkerSpec) -> WorkerConnection:
        return WorkerConnection(spec, platform.wire, hello, deadline)

    running.supervisor = Supervisor(slots, connect, running.emit, deadline, resume)
    async with _supervised(running):
        yield running


FAILURE_NOTICE = DEATH_NOTICE + sum(seconds for _, seconds in STOP_STAGES) + 1.0
"""Seconds in which the supervisor, after a connection broke, finds the cause and raises when the fleet cannot go on."""


@asynccontextmanager
async def _supervised(running: RunningFleet) -> AsyncIterator[None]:
    try:
        async with asyncio.TaskGroup() as tasks:
            supervision = tasks.create_task(running.supervisor.run(), name="supervisor")
            try:
                await running.supervisor.all_started()
                stop_watching = _watch_health(running, tasks)
                try:
                    yield
                except (PeerLost, FleetFailed):
                    if not running.all_alive:
                        await asyncio.wait([supervision], timeout=FAILURE_NOTICE)
                    raise
                stop_watching()
            finally:
                supervision.cancel()
    except BaseExceptionGroup as errors:
        raise (error := _cause(errors)) from error.__cause__


def _watch_health(running: RunningFleet, tasks: asyncio.TaskGroup) -> Callable[[], None]:
    """Starts the health poller, the stall watchdog and hang detection; returns what stops them."""
    seconds = running.facts.config.fleet.watchdog
    running.health_poller = poller = HealthPoller(running.workers, round_seconds(seconds), tasks)
    watchdog = StallWatchdog(poller, seconds, running.emit, lambda: running.describe_algorithm())
    hangs = HangDetection(poller, (*running.restarted, *running.critics), seconds, running.emit)
    watching = [
        tasks.create_task(watchdog.run(), name="stall watchdog"),
        tasks.create_task(hangs.run(), name="hang detection"),
    ]

    def stop() -> None:
        for task in watching:
            task.cancel()
        poller.close()

    return stop


def _cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the FleetFailed that explains the other errors, the supervisor's before others, else their root cause."""
    failed: BaseException | None = errors.subgroup(FleetFailed)
    while isinstance(failed, BaseExceptionGroup):
        failed = failed.exceptions[0]
    return failed or root_cause(errors)


def _next_instance(spec: ServiceSpec, worker: RemoteWorker, facts: RunFacts, platform: Platform) -> WorkerSpec:
    instance = f"{worker.name}-{facts.incarnation}-{platform.unique_id()}"
    return WorkerSpec(
        service=spec.name,
        replica=worker.replica,
        rank=worker.rank,
        layout=spec.layout,
        instance=instance,
        implementation=spec.implementation,
        addresses=platform.launcher(spec).addresses(instance),
        facts=facts,
        options=dict(spec.options),
        origin=spec.origin,
    )
