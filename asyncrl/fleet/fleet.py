"""The services of a run: their handles for algorithms, and how they are started, scaled, kept alive and stopped."""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from asyncrl.concurrency import one_error, root_cause
from asyncrl.config.install_hints import program
from asyncrl.errors import AsyncrlError, DeadlineExceeded, FleetFailed, PeerLost, Refused
from asyncrl.fleet.failure_table import OPTIONAL_CALLS, came_from_afar, is_fault
from asyncrl.fleet.health import HealthPoller, detect_hangs, round_seconds, watch_for_stalls, watch_queues
from asyncrl.fleet.launching.joining import START_TRIES
from asyncrl.fleet.launching.launcher import STOP_STAGES, InprocLauncher, Launcher, SharedProcesses
from asyncrl.fleet.lifecycle_events import (
    CallsWait,
    FleetEvent,
    FleetStalled,
    OfferDropped,
    WorkerCleanedUp,
    WorkerHung,
    WorkerLost,
    WorkerSpawned,
    WorkerStuck,
)
from asyncrl.fleet.remote_worker import DEATH_NOTICE, SHORT_CALLS, OutstandingCall, RemoteWorker, WorkerConnection
from asyncrl.fleet.replicas import Replicas
from asyncrl.fleet.service_calls import make_handle
from asyncrl.fleet.supervisor import RunningInstance, Supervisor, WorkerSlot
from asyncrl.fleet.worker.lane_access import Introductions, controller_keys, pair_of_instance
from asyncrl.fleet.worker.rank_meeting import RankMeetings
from asyncrl.fleet.worker.worker_spec import NOT_BOUND, Implementation, Origin, RunFacts, WorkerSpec
from asyncrl.lanes.control.wire import InprocWire, Wire, WireByScheme
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.host_id import FaultDomain
from asyncrl.lanes.shared_memory import unlink_run_segments
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Contract, Critic, Environment, Generation, Reference, Reward, Training
from asyncrl.telemetry.jsonl import LineFile
from asyncrl.telemetry.run_directory import replace_text

C = TypeVar("C", bound=Contract)

NOTICE_HEARTBEATS = 5
"""Heartbeats after which the deaths of all workers of a remote host are known: some are missed first, some are late."""

REMEMBERED_STUCK = 64
"""Killed instances of which no second call is reported: far more than are being killed at one time."""

FAILURE_NOTICE = DEATH_NOTICE + sum(seconds for _, seconds in STOP_STAGES) + 1.0
"""Seconds in which the supervisor, after a connection broke, finds the cause and raises when the fleet cannot go on."""


@dataclass(slots=True)
class FaultDomains:
    """Tells the calls of a fleet which groups may kill workers, and the controller how long a host takes to be lost.

    isolated: groups whose calls have replicas for themselves, and the fault domains that they avoid; set by the
    controller.
    notice_seconds: time in which the deaths of all workers of one host become known.
    """

    isolated: dict[int, frozenset[FaultDomain]] = field(default_factory=dict)
    notice_seconds: float = 2 * DEATH_NOTICE


@dataclass(frozen=True, slots=True)
class Fleet:
    """The services of a training run: handles typed by contracts, or the services themselves.

    reference: None without a KL term. evaluation: None without held-out prompts. critic, cost, cost_critic: None when
    the algorithm has none. environment: None where each sample is one answer. fault_domains: what the controller and
    the calls know of hosts that fail.
    """

    generation: Generation
    reward: Reward
    training: Training
    reference: Reference | None = None
    evaluation: Generation | None = None
    critic: Critic | None = None
    cost: Reward | None = None
    cost_critic: Critic | None = None
    environment: Environment | None = None
    fault_domains: FaultDomains = field(default_factory=FaultDomains)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A service to run.

    implementation: "module:Class". here: whether it runs inside this process; then implementation may be any callable.
    options: plain values that the service finds in its context. origin: what its processes are forked from.
    joined: workers that have to join before the fleet is handed over; others may join later. 0: none joins. scales:
    whether the number of its workers may change while it runs. devices: of each worker, in the order of replica and
    rank, and of those that it may get later, where the service is in a pool of GPUs; none: as the config says. inside:
    the service whose ranks have this one in their processes. inside_ranks: which of them, by replica and rank of this
    one; none: rank N has replica N.
    """

    name: str
    contract: type[Contract]
    implementation: Implementation
    replicas: int = 1
    layout: Layout = field(default_factory=Layout)
    options: Mapping[str, Any] = field(default_factory=dict)
    here: bool = False
    origin: Origin = "plain"
    joined: int = 0
    scales: bool = True
    devices: Sequence[tuple[str, ...]] = ()
    inside: str = ""
    inside_ranks: Sequence[Sequence[int]] = ()

    @property
    def restart(self) -> bool:
        """Returns whether a dead worker is restarted. Trainer and critic are not: what they have learnt dies with
        them, and with it what is in their processes. Nor is one of several ranks, which the others know."""
        return not (self.inside or self.layout.size > 1 or issubclass(self.contract, Training | Critic))


@dataclass(frozen=True, slots=True)
class Platform:
    """The machine that a fleet runs on, real or simulated. launcher: of the workers of a service. unique_id: returns 8
    new hex digits at each call. record: keeps a line about an instance that was spawned or has ended."""

    wire: Wire
    launcher: Callable[[ServiceSpec], Launcher]
    unique_id: Callable[[], str]
    record: Callable[[Mapping[str, Any]], None]


class RunningFleet:
    """A fleet that is being started or runs: handles by service, the workers behind them, and the events of workers.

    workers: by service. subscribers: functions that get every FleetEvent and do not block, of workers that start after
    the fleet was handed over. describe_algorithm: returns lines about the algorithm for the stall watchdog, which says
    nothing while is_paused.

    Every worker is in `workers` and has a slot of the supervisor. `running_fleet` makes it; the controller calls its
    handles, and whoever watches the run subscribes.
    """

    health_poller: HealthPoller

    def __init__(
        self,
        platform: Platform,
        specs: Sequence[ServiceSpec],
        facts: RunFacts,
        report: Callable[[str], None],
        resume: str,
    ) -> None:
        self.facts = facts
        self.restarted = [spec.name for spec in specs if spec.restart]
        self.workers = _replicas(specs)
        self.fault_domains = FaultDomains()
        if facts.heartbeat is not None:
            self.fault_domains.notice_seconds = NOTICE_HEARTBEATS * facts.heartbeat
        for replicas in self.workers.values():
            replicas.isolated = self.fault_domains.isolated
        self.subscribers: list[Callable[[FleetEvent], None]] = []
        self.describe_algorithm: Callable[[], Sequence[str]] = tuple
        self.is_paused: Callable[[], bool] = bool
        self._platform = platform
        self._report = report
        self._stuck_instances: deque[str] = deque(maxlen=REMEMBERED_STUCK)
        config = facts.config.fleet
        self._handles: dict[str, Any] = {
            spec.name: make_handle(spec.contract, self.workers[spec.name], config.call_deadline) for spec in specs
        }
        self.specs = {spec.name: spec for spec in specs}
        self._shared = SharedProcesses({spec.name: (spec.inside, spec.inside_ranks) for spec in specs if spec.inside})
        slots = [self._slot(spec, worker) for spec in specs for worker in self.workers[spec.name]]
        self.introductions = Introductions()
        self.meetings = RankMeetings()
        connect = partial(
            WorkerConnection,
            wire=platform.wire,
            hello=facts.hello("controller", 0, f"controller-{facts.incarnation}-{platform.unique_id()}"),
            start_deadline=config.start_deadline,
            introductions=self.introductions,
            meetings=self.meetings,
        )
        self.supervisor = Supervisor(slots, connect, self.emit, resume, self.fault_domains.isolated)

    def _slot(self, spec: ServiceSpec, worker: RemoteWorker) -> WorkerSlot:
        worker.on_failure = partial(self._failed, worker)
        is_awaited = not spec.joined or worker.replica < spec.joined
        launcher = self._shared.launcher_of(spec.name, worker.replica, worker.rank, self._platform.launcher(spec))
        replicas = self.workers[spec.name]
        make_spec = partial(self._next_instance, spec, worker)
        slot = WorkerSlot(worker, replicas, make_spec, launcher, spec.restart, bool(spec.inside), is_awaited)
        slot.is_joined = bool(spec.joined)
        return slot

    def _next_instance(self, spec: ServiceSpec, worker: RemoteWorker) -> WorkerSpec:
        """Specifies the next instance of a worker, of the incarnation that runs now."""
        instance = f"{worker.name}-{self.facts.incarnation}-{self._platform.unique_id()}"
        number = worker.replica * spec.layout.size + worker.rank
        return WorkerSpec(
            service=spec.name,
            replica=worker.replica,
            rank=worker.rank,
            layout=spec.layout,
            instance=instance,
            implementation=spec.implementation,
            addresses=NOT_BOUND,
            facts=self.facts,
            options=dict(spec.options),
            origin=spec.origin,
            devices=spec.devices[number] if spec.devices else (),
            curve=None if spec.here else pair_of_instance(self.facts),
        )

    def add_replica(self, service: str) -> None:
        """Starts one more replica of a service, for which nothing waits."""
        for worker in self.workers[service].grow():
            self.supervisor.add(replace(self._slot(self.specs[service], worker), is_awaited=False))

    def handle(self, service: str, contract: type[C]) -> C:
        """Returns the handle on a service, typed by its contract."""
        return cast(C, self._handles[service])

    @property
    def fleet(self) -> Fleet:
        """Returns the services of a training run. A policy that acts has its rewards from its environments: there the
        reward service is a contract that nothing implements."""
        named = {"reward": Reward(), **self._handles}
        handles = {name: handle for name, handle in named.items() if name in Fleet.__annotations__}
        return Fleet(**handles, fault_domains=self.fault_domains)

    def fault_domain_of(self, instance: str) -> FaultDomain:
        """Returns where the worker of this instance was started last."""
        name = worker_name(instance)
        return next(worker.host.fault_domain for worker in self._all_workers() if worker.name == name)

    def alive_in(self, domain: FaultDomain) -> list[str]:
        """Returns the names of the workers that are alive in a fault domain."""
        return [worker.name for worker in self._all_workers() if worker.host.fault_domain == domain and worker.alive]

    def _all_workers(self) -> Iterator[RemoteWorker]:
        return (worker for replicas in self.workers.values() for worker in replicas)

    def emit(self, event: FleetEvent) -> None:
        """Acts on an event, reports what a person should read, and passes the event to all subscribers."""
        match event:
            case WorkerSpawned(_, instance):
                self._platform.record(spawned_line(self.supervisor.instances[worker_name(instance)]))
            case WorkerCleanedUp(_, instance):
                self._platform.record({"ended": instance})
            case WorkerLost(_, instance, reason, is_drained=True):
                self._report(f"{instance} has left: {reason}")
            case WorkerLost(_, instance, reason, has_left=True):
                self._report(f"{instance} was given up: {reason}; its groups begin again")
            case WorkerLost(service, instance, reason) if service in self.restarted:
                self._report(f"lost {instance}: {reason}; it is started again")
            case OfferDropped(service, name, reason):
                again = f"`{program()} scale {self.facts.run_dir} {service}=N` asks for it again"
                self._report(f"{name} is not started any more after {START_TRIES} tries: {reason}; {again}")
            case WorkerHung(service, instance, seconds):
                lives = service in self.restarted or self.supervisor.learners is not None
                effect = "it is killed and started again" if lives else "it is killed: the run ends"
                self._report(f"{instance} has answered no call for {seconds:.0f} s, not even for its health; {effect}")
                self.supervisor.kill(instance)
            case WorkerStuck(service, instance, reason):
                self._report(f"{reason}; {instance} is killed and started again")
                self.supervisor.kill(instance)
            case FleetStalled(description) | CallsWait(description):
                self._report(description)
        for notify in self.subscribers:
            notify(event)

    def _failed(self, worker: RemoteWorker, call: OutstandingCall, is_work: bool, error: AsyncrlError) -> bool:
        """Acts on the error of a call. Returns whether its worker ends for it, of which others have to make the call:
        for what it raised, but not for what it heard from others or did not answer in time."""
        if isinstance(error, DeadlineExceeded):
            if call.method not in SHORT_CALLS:
                self._stuck(worker, call.instance, str(error), is_work)
            return False
        if call.method in OPTIONAL_CALLS or not came_from_afar(error):
            return False
        if not is_fault(error) and not (is_work and isinstance(error, Refused)):
            return False
        return self.supervisor.fail(worker, call, error)

    def _stuck(self, worker: RemoteWorker, instance: str, reason: str, is_work: bool) -> None:
        """Reports an instance that holds calls without progress, once: the calls that follow say the same. Of ranks,
        which wait for each other, it is the one silent for longest; none where its death ends the run."""
        learns = worker.service not in self.restarted
        if self.supervisor.learners is None if learns else not is_work:
            return  # Its caller acts on that.
        if learns:
            ranks = (each for each in self.workers[worker.service] if each.replica == worker.replica and each.alive)
            instance = min(ranks, key=lambda rank: rank.last_answer_at, default=worker).instance
        running = any(each.spec.instance == instance for each in self.supervisor.instances.values())
        if running and instance not in self._stuck_instances:
            self._stuck_instances.append(instance)
            self.emit(WorkerStuck(worker.service, instance, reason))


def _new_fleet_file(run_dir: Path) -> LineFile:
    """Returns fleet.jsonl, which takes one line for each worker that is spawned or has ended in this start of the run:
    so a start costs the same for each worker. A worker that is killed with the fleet has no line of its end."""
    path = run_dir / "fleet.jsonl"
    replace_text(path, "")  # Readers see the workers of the earlier start, or those of this one.
    return LineFile(path)


def _replicas(specs: Sequence[ServiceSpec]) -> dict[str, Replicas]:
    found = {spec.name: Replicas(spec.name, spec.replicas, spec.layout) for spec in specs}
    for spec in specs:
        found[spec.name].trainer = found[spec.inside].layout if spec.inside else None
    return found


def worker_name(instance: str) -> str:
    """Returns the name of the worker of an instance."""
    return instance.partition("-")[0]


def spawned_line(running: RunningInstance) -> dict[str, Any]:
    """Returns the line of fleet.jsonl about an instance that was spawned; {"ended": instance} follows it."""
    spec = running.spec
    return {
        **running.launched.labels,
        "instance": spec.instance,
        "service": spec.service,
        "replica": spec.replica,
        "rank": spec.rank,
        "host": running.launched.host.name,
        "address": spec.addresses.control,
    }


@asynccontextmanager
async def running_fleet(
    specs: Sequence[ServiceSpec],
    facts: RunFacts,
    *,
    launcher: Launcher | None = None,
    join_point: Launcher | None = None,
    report: Callable[[str], None] = print,
    resume: str = "the same command",
) -> AsyncIterator[RunningFleet]:
    """Starts all workers in parallel, waits until all take calls, keeps them alive, and stops them at the end.

    launcher: starts the workers of services that are not `here`; None: all of them run in this process. join_point:
    launches those of services whose workers join. report: takes what a person should read about workers that are lost,
    hang or stall. resume: the command that resumes the run.

    Raises:
        FleetFailed: trainer or critic died, or another worker too often; raised out of the block too, whose tasks are
            cancelled first.
        AsyncrlError: what a worker raised while it started.
    """
    async with AsyncExitStack() as scope:
        scope.callback(unlink_run_segments, facts.run)  # Workers that were killed left theirs.
        inproc = InprocWire()
        keys, facts = controller_keys(facts)
        wire = WireByScheme(inproc, ZmqWire(keys))
        scope.callback(wire.close)
        here = InprocLauncher(wire, inproc)
        scope.push_async_callback(here.close)
        platform = Platform(
            wire,
            partial(_launcher_of, here, launcher, join_point),
            lambda: secrets.token_hex(4),
            scope.enter_context(closing(_new_fleet_file(facts.run_dir))).append,
        )
        yield await scope.enter_async_context(fleet_on(platform, specs, facts, report=report, resume=resume))


def _launcher_of(here: Launcher, launcher: Launcher | None, join_point: Launcher | None, spec: ServiceSpec) -> Launcher:
    if spec.joined and join_point is not None:
        return join_point
    return here if spec.here or launcher is None else launcher


@asynccontextmanager
async def fleet_on(
    platform: Platform, specs: Sequence[ServiceSpec], facts: RunFacts, *, report: Callable[[str], None], resume: str
) -> AsyncIterator[RunningFleet]:
    """Does what `running_fleet` does, on any platform."""
    running = RunningFleet(platform, specs, facts, report, resume)
    seconds = facts.config.fleet.watchdog
    watches: list[asyncio.Task[None]] = []
    with one_error(_cause):
        async with asyncio.TaskGroup() as tasks:
            running.health_poller = poller = HealthPoller(running.workers, round_seconds(seconds), tasks)
            supervision = tasks.create_task(running.supervisor.run(), name="supervisor")
            watches.append(tasks.create_task(running.introductions.keep_current(), name="callers of workers"))
            try:
                await running.supervisor.all_started.wait()
                described = (lambda: running.describe_algorithm(), lambda: running.is_paused())
                stalls = watch_for_stalls(poller, seconds, running.emit, *described)
                watches.append(tasks.create_task(stalls, name="stall watchdog"))
                hangs = detect_hangs(poller, seconds, running.emit)
                watches.append(tasks.create_task(hangs, name="hang detection"))
                queues = watch_queues(poller, facts.config.fleet.call_deadline, running.emit)
                watches.append(tasks.create_task(queues, name="queue watchdog"))
                yield running
            except (PeerLost, FleetFailed):
                if not all(worker.alive for replicas in running.workers.values() for worker in replicas):
                    await asyncio.wait([supervision], timeout=FAILURE_NOTICE)
                raise
            finally:
                for task in watches:
                    task.cancel()
                poller.close()
                supervision.cancel()


def _cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the FleetFailed that explains the other errors, the supervisor's before others, else their root cause."""
    failed: BaseException | None = errors.subgroup(FleetFailed)
    while isinstance(failed, BaseExceptionGroup):
        failed = failed.exceptions[0]
    return failed or root_cause(errors)


# ---- more or fewer workers of a service ----------------------------------------------------------------------------
#
# more    parked workers are wanted again, then new ones are added: they start like restarted ones
# fewer   workers that do not run, then those with the highest numbers, are parked: they drain first


MOST_WORKERS = 1000
"""Workers of one service: as many as a fleet was tried with, and fewer than a slip of the finger asks for."""

DRAIN = 60.0
"""Seconds for a worker to finish what it has: nobody waits for its end, unlike that of a host."""


def scale(running: RunningFleet, service: str, count: int) -> str:
    """Makes `count` workers of a service run; returns what happens. Raises Refused for what cannot be."""
    spec = scalable(running.specs, service, count)
    supervisor = running.supervisor
    slots = supervisor.slots_of(service)
    wanted = [slot for slot in slots if slot.wanted.is_set()]
    parked = [slot for slot in slots if not slot.wanted.is_set()][: max(0, count - len(wanted))]
    for slot in parked:
        slot.wanted.set()
    new = [f"{service}{number}.0" for number in range(len(slots), len(slots) + count - len(wanted) - len(parked))]
    for _ in new:
        running.add_replica(service)
    surplus = sorted(wanted, key=lambda slot: (slot.worker.alive, -slot.worker.replica))[: max(0, len(wanted) - count)]
    for slot in surplus:
        supervisor.park(slot, DRAIN)
    changes = [f"{service} has places for {count} workers" if spec.joined else f"{service}: {len(wanted)} -> {count}"]
    if starting := [slot.worker.name for slot in parked] + new:
        changes.append(f"{', '.join(starting)} {'may join' if spec.joined else 'start'}")
    if surplus:
        names = ", ".join(slot.worker.name for slot in surplus)
        changes.append(f"{names} end with what they have, within {DRAIN:g} s")
    return "; ".join(changes)


def scalable(specs: Mapping[str, ServiceSpec], service: str, count: int) -> ServiceSpec:
    """Returns the spec of a service that may have so many workers. Raises Refused."""
    able = [name for name, spec in specs.items() if _may_scale(spec)]
    listed = f"The services that may are {', '.join(able)}"
    if service not in specs:
        raise Refused(f"this run has no service {service!r} whose number of workers could change. {listed}")
    spec = specs[service]
    if not spec.restart:
        raise Refused(
            f"the number of {service} workers does not change while a run goes on, because each has a part of a model "
            f"or of what is learnt. Stop the run, and resume it with another {service}.layout. {listed}"
        )
    if not _may_scale(spec):
        raise Refused(f"{service} has one worker in this run, which no other one can stand in for. {listed}")
    if not 1 <= count <= MOST_WORKERS:
        raise Refused(f"{service}={count} is out of range: write 1 to {MOST_WORKERS}")
    if spec.devices and count > len(spec.devices):
        raise Refused(
            f"{service}={count} needs a GPU for each worker, and the pool of {service} has room for "
            f"{len(spec.devices)}: stop the run, and resume it with more devices in the pool"
        )
    return spec


def _may_scale(spec: ServiceSpec) -> bool:
    return spec.restart and spec.scales and not spec.here and spec.layout.size == 1
