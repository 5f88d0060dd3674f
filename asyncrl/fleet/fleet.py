"""The services of a run: as a page sees them, and how they are started, linked, kept alive and stopped."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from asyncrl.compute import ThreadCompute
from asyncrl.errors import FleetFailed, PeerLost, first
from asyncrl.handle import connect
from asyncrl.inproc_launcher import InprocLauncher
from asyncrl.launch import Launcher, RunFacts, WorkerSpec
from asyncrl.links import Links
from asyncrl.memory import sweep
from asyncrl.protocols.contracts import Contract, Critic, Generation, Reference, Reward, Training
from asyncrl.protocols.layout import Layout
from asyncrl.protocols.messages import Hello
from asyncrl.rundir import replace_text
from asyncrl.silence import Silence
from asyncrl.supervisor import STOP_STAGES, Post, Present, Supervisor
from asyncrl.watchdog import Watchdog
from asyncrl.wire.auth import CurveKeys
from asyncrl.wire.ends import Wire, Wires
from asyncrl.wire.inproc import InprocWire
from asyncrl.wire.socket import ZmqWire
from asyncrl.worker import identity
from asyncrl.workers import DEATH_NOTICE, RemoteWorker, Workers

if TYPE_CHECKING:
    from asyncrl.launch import Implementation

C = TypeVar("C", bound=Contract)
Told = Callable[[str, str], None]
Note = Callable[[Mapping[str, Present]], None]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Handles typed by contracts, or the services themselves.

    reference: None when no log-probabilities of a frozen model are needed. evaluation: None without held-out prompts.
    critic, cost, cost_critic: None where the algorithm has none.
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
    """A service to run. implementation: "module:Class"; here: inside this process, where it may be any callable.

    options: plain values that the service finds in its context.
    """

    name: str
    contract: type[Contract]
    implementation: "Implementation"
    replicas: int = 1
    layout: Layout = field(default_factory=Layout)
    options: Mapping[str, Any] = field(default_factory=dict)
    here: bool = False

    @property
    def restart(self) -> bool:
        """Whether the run survives a worker's death. What trainer and critic have learnt dies with them."""
        return not issubclass(self.contract, Training | Critic)


class RunningFleet:
    """What `running_fleet` gives: handles by service, and news of workers.

    Lists of functions to call, which must not block. on_lives(service, instance): it takes calls; those that live when
    the fleet is handed over are not told. on_lost(service, instance, why): its calls have failed. on_gone(service,
    instance): nothing of it runs any more; who waits for it to let go of something need not any longer.
    about_page: what the watchdog says of whatever calls the workers.
    """

    def __init__(
        self, facts: RunFacts, specs: Sequence[ServiceSpec], report: Callable[[str], None], note: Note
    ) -> None:
        self.facts, self._report, self._note = facts, report, note
        self.restarted = [spec.name for spec in specs if spec.restart]
        self.critics = [spec.name for spec in specs if issubclass(spec.contract, Critic)]
        self.on_lives: list[Told] = []
        self.on_lost: list[Callable[[str, str, str], None]] = []
        self.on_gone: list[Told] = []
        self.about_page: Callable[[], Sequence[str]] = tuple
        self.workers = {spec.name: Workers(spec.name, spec.replicas, spec.layout) for spec in specs}
        deadline = facts.config.fleet.call_deadline
        self._handles = {spec.name: connect(spec.contract, self.workers[spec.name], deadline) for spec in specs}
        self.supervisor: Supervisor

    def handle(self, service: str, contract: type[C]) -> C:
        """The handle on a service, typed by its contract."""
        return cast(C, self._handles[service])

    @property
    def fleet(self) -> Fleet:
        """The services of a training run. Raises KeyError when one of the three that every run has is missing."""
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
    def all_live(self) -> bool:
        """Whether every worker takes calls."""
        return all(worker.lives for workers in self.workers.values() for worker in workers)

    def progressed(self) -> None:
        """A group was finished: deaths so far do not end the run."""
        self.supervisor.progressed()

    def kill(self, instance: str) -> None:
        """End an instance that holds up others; another one is started in its place."""
        self.supervisor.kill(instance)

    # ---- what the supervisor tells -----------------------------------------------------------------------

    def changed(self, present: Mapping[str, Present]) -> None:
        self._note(present)

    def lives(self, service: str, instance: str) -> None:
        for tell in self.on_lives:
            tell(service, instance)

    def lost(self, service: str, instance: str, why: str) -> None:
        if service in self.restarted:
            self._report(f"lost {instance}: {why}; it is started again")
        for tell in self.on_lost:
            tell(service, instance, why)

    def gone(self, service: str, instance: str) -> None:
        for tell in self.on_gone:
            tell(service, instance)


def write_fleet_file(path: Path, present: Mapping[str, Present]) -> None:
    """Write {"workers": [{service, replica, rank, pid, address}]}; readers see the old file or the new one."""
    workers = [
        {
            "service": each.spec.service,
            "replica": each.spec.replica,
            "rank": each.spec.rank,
            "pid": each.process.pid,
            "address": each.spec.addresses.control,
        }
        for _, each in sorted(present.items())
    ]
    replace_text(path, json.dumps({"workers": workers}, indent=1) + "\n")


@asynccontextmanager
async def running_fleet(
    specs: Sequence[ServiceSpec],
    facts: RunFacts,
    *,
    launcher: Launcher | None = None,
    report: Callable[[str], None] = print,
    resume: str = "the same command",
) -> AsyncIterator[RunningFleet]:
    """Start all workers in parallel, wait until all take calls, keep them alive, and stop them at the end.

    Args:
        launcher: starts the workers of services that are not `here`; None: all of them live in this process.
        report: takes what a person should read: a worker that was lost and is started again, and the text that the
            watchdog writes when nothing moves.
        resume: the command that goes on with the run.

    Raises:
        FleetFailed: the trainer died, or another worker six times without a finished group; also out of the block,
            whose tasks are cancelled first.
        AsyncrlError: what a worker raised while it started.
    """
    async with AsyncExitStack() as scope:
        scope.callback(sweep, facts.run)  # of workers that had to be killed
        inproc = InprocWire()
        wire = Wires(inproc, ZmqWire(CurveKeys(*facts.curve) if facts.curve else None))
        scope.callback(wire.close)
        here = await scope.enter_async_context(InprocLauncher(wire, inproc, ThreadCompute))
        ground = Ground(
            wire,
            lambda spec: here if spec.here or launcher is None else launcher,
            lambda: secrets.token_hex(4),
            partial(write_fleet_file, Path(facts.run_dir) / "fleet.json"),
        )
        yield await scope.enter_async_context(fleet_on(ground, specs, facts, report=report, resume=resume))


@dataclass(frozen=True, slots=True)
class Ground:
    """What a fleet stands on: this machine, or a simulated one.

    launcher: of the workers of a service. unique: 8 hex digits, new ones each time. note: told who is there now.
    """

    wire: Wire
    launcher: Callable[[ServiceSpec], Launcher]
    unique: Callable[[], str]
    note: Note


@asynccontextmanager
async def fleet_on(
    ground: Ground, specs: Sequence[ServiceSpec], facts: RunFacts, *, report: Callable[[str], None], resume: str
) -> AsyncIterator[RunningFleet]:
    """`running_fleet` on any ground."""
    running = RunningFleet(facts, specs, report, ground.note)
    posts = [
        Post(worker, _next_instance(spec, worker, facts, ground), ground.launcher(spec), spec.restart)
        for spec in specs
        for worker in running.workers[spec.name]
    ]
    running.supervisor = _supervisor(posts, facts, ground, running, resume)
    async with _kept(running, report):
        yield running


VERDICT = DEATH_NOTICE + sum(seconds for _, seconds in STOP_STAGES) + 1.0
"""Seconds at most until the supervisor, whose link to a worker broke, knows the cause and says that it cannot go on."""


@asynccontextmanager
async def _kept(running: RunningFleet, report: Callable[[str], None]) -> AsyncIterator[None]:
    patience = running.facts.config.fleet.watchdog
    watchdog = Watchdog(running.workers, patience, report, lambda: running.about_page())
    silence = Silence(running.workers, running.restarted, running.critics, patience, report, running.kill)
    try:
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(running.supervisor.run(), name="supervisor")
            try:
                await running.supervisor.all_started()
                watching = [
                    tasks.create_task(watchdog.run(), name="watchdog"),
                    tasks.create_task(silence.run(), name="who is silent"),
                ]
                try:
                    yield
                except (PeerLost, FleetFailed):
                    if not running.all_live:
                        await asyncio.wait([keeping], timeout=VERDICT)
                    raise
                for task in watching:
                    task.cancel()
            finally:
                keeping.cancel()
    except BaseExceptionGroup as errors:
        raise (error := _cause(errors)) from error.__cause__


def _cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """A failed fleet explains every other error that came with it; the supervisor speaks first and knows best."""
    failed: BaseException | None = errors.subgroup(FleetFailed)
    while isinstance(failed, BaseExceptionGroup):
        failed = failed.exceptions[0]
    return failed or first(errors)


def _next_instance(
    spec: ServiceSpec, worker: RemoteWorker, facts: RunFacts, ground: Ground
) -> Callable[[], WorkerSpec]:
    launcher = ground.launcher(spec)

    def make() -> WorkerSpec:
        instance = f"{worker.name}-{facts.epoch}-{ground.unique()}"
        return WorkerSpec(
            service=spec.name,
            replica=worker.replica,
            rank=worker.rank,
            layout=spec.layout,
            instance=instance,
            implementation=spec.implementation,
            addresses=launcher.addresses(instance),
            facts=facts,
            options=dict(spec.options),
        )

    return make


def _supervisor(posts: list[Post], facts: RunFacts, ground: Ground, running: RunningFleet, resume: str) -> Supervisor:
    deadline = facts.config.fleet.start_deadline
    hello: Hello = identity(facts, "controller", 0, f"controller-{facts.epoch}-{ground.unique()}")

    def links(spec: WorkerSpec) -> Links:
        return Links(spec, ground.wire, hello, deadline)

    return Supervisor(posts, links, running, deadline, resume)
