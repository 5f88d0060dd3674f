"""Runs a trial from its first draw to its last step, through all lives of its controller."""

import asyncio
import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config, ModelConfig, TaskConfig
from asyncrl.controller.journal.audit import Audit
from asyncrl.controller.journal.journal import Scan
from asyncrl.controller.journal.ledger import AttemptStarted, Drawn, Trained
from asyncrl.controller.observers.events import Event, GroupFinished, GroupPoisoned, SampleScored, StepDone, Warned
from asyncrl.controller.recovery import train_with_returns
from asyncrl.controller.training_run import WorkerEvents
from asyncrl.errors import DeadlineExceeded, FleetFailed, PeerLost, Refused
from asyncrl.fleet.fleet import Platform, RunningFleet, ServiceSpec, fleet_on, scale
from asyncrl.fleet.launching.join_point import open_join_point
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.fleet.worker.worker_spec import Implementation, RunFacts
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import CREDIT
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Environment, Generation, Lane, Reference, Training
from asyncrl.simulation import virtual_loop
from asyncrl.simulation.faults.fault_injection import AGE_LIMIT, CHECK_PERIOD, FLEET, FaultInjection
from asyncrl.simulation.faults.faulty_platform import ANY, FaultyLauncher, FaultyWire, ProcessWire
from asyncrl.simulation.faults.slow_disk import SlowDisk
from asyncrl.simulation.faults.trial_hosts import TrialHosts
from asyncrl.simulation.faults.trial_plan import BASE, ENOUGH, MEMBERSHIP, Fault, Trial
from asyncrl.simulation.faults.trial_services import (
    GroundTruth,
    RankExchanges,
    TicketReward,
    TrialEnvironment,
    TrialGeneration,
    TrialReference,
    TrialReward,
    TrialTraining,
    TrialTrainingRank,
    TrialViolation,
)
from asyncrl.simulation.resumable_run import ResumableRun

TICKET_PAUSE = 2.0
PREEMPTION_PERIOD = 60.0
HEARTBEAT = 4.0
"""Seconds between heartbeats to remote workers."""
LIFE_LIMIT = 3_000.0
"""Seconds of virtual time that one life of a controller may take."""

CONFIG = Config(model=ModelConfig(name="none"), task=TaskConfig(prompts="none"), fleet=FLEET)


class TrialRun:
    """A trial while it runs, and what it did. Everything in it outlives a controller.

    version: of the last step. digest: hash of all events and messages. lives: how often a controller was started.
    poisoned: groups dropped as poison. restarted: attempts that failed. most_isolated: groups that ran alone at one
    time. truncated: samples that ended as `length`. preempted: how often a host was lost to a preemption. ends: how
    each life ended. warnings: for a person. alive: workers of each service that took calls when the last step
    ended. returns: to checkpoints, without a new life. wire: connects all processes. hosts: machines whose workers
    join; None without.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.truth = GroundTruth(trial, random.Random(f"rows {trial.seed}"))
        self.faults = FaultInjection(trial, self.truth)
        self.wire = FaultyWire(self.faults)
        self.hosts: TrialHosts | None = None
        if trial.joined:
            seed = f"hosts {trial.seed}"
            self.hosts = TrialHosts(self.wire, trial.joining, seed, self.truth.ended, self.truth.report)
        self.events = sha256()
        self.names = itertools.count(1)
        self.tickets = itertools.count(1)
        self.version = 0
        self.digest = ""
        self.lives = 0
        self.returns = 0
        self.poisoned: list[int] = []
        self.restarted = 0
        self.preempted = 0
        self.most_isolated = 0
        self.truncated = 0
        self.ends: list[str] = []
        self.warnings: list[str] = []
        self.alive: dict[str, int] = {}

    async def run(self) -> None:
        """Raises TrialViolation, or the error of a controller that no fault explains."""
        before = asyncio.all_tasks()
        chance = random.Random(f"disk {self.trial.seed}")
        disk = SlowDisk()
        if self.hosts is not None:
            for number in range(self.trial.hosts):
                self.hosts.boot(f"host{number}")
        while True:
            self.lives += 1
            life = await self._live(disk)
            if self.hosts is None:
                self._check_left(before)
            if life.power_cut is None:
                break
            disk = disk.after_failure(life.power_cut, chance)
            assert self.lives <= len(self.faults.injected) + 1, f"too many deaths: {self.ends}"
        if self.hosts is not None:
            await self.hosts.end()
        self._check_left(before)
        self._check_isolation()
        self._check_drains()
        self._check_history(disk)
        self.events.update(self.faults.digest.digest())
        self.digest = self.events.hexdigest()[:32]

    def _check_left(self, before: set[asyncio.Task[Any]]) -> None:
        left = [task.get_name() for task in asyncio.all_tasks() - before]
        assert not left, f"tasks are left: {left}"

    async def _live(self, disk: SlowDisk) -> "ControllerLife":
        injected = len(self.faults.injected)
        life = ControllerLife(self, disk)
        self.faults.begin(life)
        await asyncio.wait([life.task], timeout=LIFE_LIMIT)
        if life.task.done() and not life.task.cancelled():
            life.task.exception()  # Retrieved, or asyncio would log that nothing did.
        self.check_truth()
        if not life.task.done():
            raise TrialViolation(f"the run did not end: {self.faults.loop.pending()}")
        await life.clean_up()
        life.explain_end(len(self.faults.injected) > injected)
        self.ends.append(life.end)
        return life

    def _check_isolation(self) -> None:
        """Checks that no group ran alone where one host was lost, once: the deaths there are one event."""
        losses = [fault for fault in self.faults.injected if fault.kind not in ("leave", "join", "scale")]
        of_one_host = all(
            fault.kind in ("host", "partition", "one-way") and {fault.target, fault.peer} != {BASE, ANY}
            for fault in losses
        )
        if of_one_host and len(losses) <= 1 and not self.trial.poison:
            assert not self.most_isolated, f"a group ran alone although one host was lost, once: {losses}"

    def _check_drains(self) -> None:
        """Checks that no attempt failed where workers only came, or left with enough time and not the last ones: rows
        that wait for a batch keep a worker from its end, and without another one there is no batch."""
        kinds = [fault.kind for fault in self.faults.injected]
        leaving = [fault.seconds for fault in self.faults.injected if fault.kind == "leave"]
        stay = not leaving or len(leaving) + kinds.count("scale") < self.trial.generators
        orderly = {*kinds}.issubset(("join", "scale", "leave")) and not self.trial.preemptions
        if stay and orderly and min(leaving, default=ENOUGH) == ENOUGH:
            assert self.trial.poison or not self.restarted, f"{self.restarted} attempts failed although all had time"

    def check_truth(self) -> None:
        if self.truth.violation:
            raise TrialViolation(self.truth.violation)

    def _check_history(self, disk: SlowDisk) -> None:
        audit = Audit(disk)
        assert audit.ok, str(audit)
        records = [framed.record for framed in Scan(disk).surviving() if isinstance(framed.record, Trained)]
        journaled = {
            made.version: tuple((group, m) for group, members in made.cuts for m in members) for made in records
        }
        assert journaled == self.truth.steps, f"the journal says {journaled}; trained was {self.truth.steps}"
        self.version = max(journaled)
        assert self.version >= self.trial.steps, f"the run ended at version {self.version}"


class ControllerLife(ResumableRun):
    """Runs one controller with its fleet, from the beginning or the last checkpoint on the disk.

    over: whether it was killed or has ended. end: how it ended, in words. power_cut: how its disk fails: in a power cut
    or not; None while the run has not failed.
    """

    def __init__(self, run: TrialRun, disk: SlowDisk) -> None:
        disk.skip = run.faults.skip
        super().__init__(run.trial, disk, run.check_truth)
        self.disk = disk
        self.over = False
        self.end = "finished"
        self.power_cut: bool | None = None
        self._run = run
        base = BASE if run.hosts is not None else ""
        self._wire = ProcessWire(run.wire, base)
        self._fleet: RunningFleet | None = None
        seed = f"processes {run.trial.seed} {run.lives}"
        trial = run.trial
        self.launcher = FaultyLauncher(
            *(run.wire, seed, trial.hosts), remote=trial.remote, on_end=run.truth.ended, base=base
        )
        self.task = asyncio.get_running_loop().create_task(self._live(), name="controller")

    def kill(self, *, power_cut: bool) -> None:
        """Kills the controller and its workers; nothing that their tasks still do has an effect."""
        self.over = True
        self.power_cut = power_cut
        self.end = "power cut" if power_cut else "controller killed"
        self.disk.freeze()
        self._wire.close()
        self.launcher.kill_all()
        self.task.cancel()

    async def clean_up(self) -> None:
        self.over = True
        self.launcher.kill_all()
        await self.launcher.wait_until_idle()

    def explain_end(self, injected: bool) -> None:
        """Notes the error of the controller. Raises one that no fault explains. injected: whether faults were."""
        if self.power_cut is not None:
            return
        if self.task.cancelled():
            raise TrialViolation("the controller was cancelled although no fault killed it")
        if (error := self.task.exception()) is None:
            return
        kinds = {fault.kind for fault in self._run.faults.injected}
        if self._run.hosts is not None and kinds.issubset(MEMBERSHIP):
            raise error
        # Faults may cost so much time that a deadline of the trainer, or of a start, ends the run.
        lost_time = any(kind in ("jump", "disk", "stall", "lose") for kind in kinds)
        if isinstance(error, DeadlineExceeded) or isinstance(error.__cause__, DeadlineExceeded):
            explained = lost_time
        else:
            explained = isinstance(error, FleetFailed) and injected
        if not explained:
            raise error
        self.end = repr(error)
        self.power_cut = False

    async def _live(self) -> None:
        run = self._run
        run.truth.resumed(self.gate.version)
        facts = RunFacts(
            run="feedbeef",
            run_dir=Path("/nowhere"),
            model_dir=Path("/nowhere"),
            incarnation=self.incarnation,
            weights_arena="none",
            config=CONFIG,
            checkpoint_dir=Path(self.plan.directory) if self.plan else None,
            heartbeat=HEARTBEAT if self._run.trial.remote else None,
        )
        async with AsyncExitStack() as scope:
            specs = list(self._specs())
            point = None
            if run.hosts is not None:
                point = await scope.enter_async_context(open_join_point(run.hosts.join_point(specs), self._wire))
            platform = Platform(
                self._wire,
                lambda spec: point if point is not None and spec.joined else self.launcher,
                lambda: f"{next(run.names):08x}",
                lambda _: None,
            )
            running = fleet_on(platform, specs, facts, report=lambda _: None, resume="the same")
            fleet = await scope.enter_async_context(running)
            if point is not None:
                point.retire = fleet.supervisor.retire
            self._fleet = fleet
            await train_with_returns(fleet, self, self._train, self._resumed, self.disk, most=run.trial.returns)

    async def _resumed(self, _: "ControllerLife") -> "ControllerLife":
        self.take_up()
        self._run.returns += 1
        self._run.truth.returned(self.gate.version)
        return self

    def _specs(self) -> Iterator[ServiceSpec]:
        trial = self._run.trial
        truth = self._run.truth
        sizes = {"generation": trial.generators, "reward": trial.scorers}
        joined = {service: sizes[service] for service in trial.joining}
        generation: Implementation = partial(TrialGeneration, truth, self.disk)
        reward: Implementation = partial(TrialReward, truth)
        if self._run.hosts is not None:  # An order to start a worker is text.
            self._run.hosts.factories = {"generation": generation, "reward": reward}
            generation = "generation"
            reward = "reward"
        yield ServiceSpec("generation", Generation, generation, trial.generators, joined=joined.get("generation", 0))
        yield ServiceSpec("reward", TicketReward, reward, trial.scorers, joined=joined.get("reward", 0))
        training: Implementation = partial(TrialTraining, truth, self.disk)
        if trial.ranks > 1:
            training = partial(TrialTrainingRank, truth, self.disk, RankExchanges(trial))
        yield ServiceSpec("training", Training, training, layout=Layout(dp=trial.ranks))
        if trial.turns:
            yield ServiceSpec("environment", Environment, partial(TrialEnvironment, truth))
        if trial.reference:
            yield ServiceSpec("reference", Reference, partial(TrialReference, truth))

    def runs(self, instance: str) -> bool:
        return self.launcher.runs(instance) or (self._run.hosts is not None and self._run.hosts.runs(instance))

    def kill_one(self, service: str) -> None:
        if (hosts := self._run.hosts) is not None and service in self._run.trial.joining:
            hosts.kill_one(service)
        else:
            self.launcher.kill_one(service)

    def change_hosts(self, fault: Fault) -> None:
        """Injects a fault of whole hosts, or changes how many workers run."""
        if fault.kind == "scale" and self._fleet is not None:
            with suppress(Refused):  # The run is ending.
                scale(self._fleet, fault.target, fault.count)
        elif self._run.hosts is not None:
            self._run.hosts.change(fault)
        elif fault.kind == "host":
            self.launcher.kill_host(fault.target)

    async def _train(self, _: "ControllerLife") -> None:
        fleet = self._fleet
        assert fleet is not None, "it has started"
        self._waits = WaitChecks(self._run.faults, self.gate.groups())
        self.make_controller(fleet.fleet, self._run.trial.deadline, self._observe, fleet.supervisor.kill)
        beside = {
            "worker events": WorkerEvents(fleet, self.controller).follow(),
            "checks": self._check(fleet),
            "preemptions": self._preempt(),
            "tickets": self._count_tickets(fleet.handle("reward", TicketReward)),
        }
        try:
            await self.run_controller(beside)
        except DeadlineExceeded as late:  # As in a run.
            raise FleetFailed(str(late)) from late

    async def _preempt(self) -> None:
        for _ in range(self._run.trial.preemptions):
            await asyncio.sleep(PREEMPTION_PERIOD)
            self.launcher.lose_host(HostId("host0"))
            self._run.preempted += 1
        await asyncio.Event().wait()

    async def _count_tickets(self, reward: TicketReward) -> None:
        """Makes calls that must not be repeated, each with its own ticket; faults lose some of them."""
        while True:
            with suppress(PeerLost, DeadlineExceeded):
                await reward.count(next(self._run.tickets))
            await asyncio.sleep(TICKET_PAUSE)

    def _observe(self, event: Event) -> None:
        if self.over:
            return
        if isinstance(event, GroupPoisoned):
            self._check_poison(event)
        assert self._fleet is not None, "set before the controller begins"
        isolated = len(self._fleet.fault_domains.isolated)
        self._run.most_isolated = max(self._run.most_isolated, isolated)
        self._run.restarted += isinstance(event, AttemptStarted)
        self._run.truncated += isinstance(event, SampleScored) and event.sample.finish == "length"
        if isinstance(event, Warned):
            self._run.warnings.append(event.text)
        if isinstance(event, StepDone):
            workers = self._fleet.workers.items()
            self._run.alive = {service: sum(each.alive for each in replicas) for service, replicas in workers}
        self._run.events.update(f"{asyncio.get_running_loop().time()!r} {event!r}\n".encode())
        if isinstance(event, GroupFinished) and not event.poison:
            self._fleet.supervisor.progressed()
        self.invariants.observe(event)
        self._waits.observe(event)

    def _check_poison(self, event: GroupPoisoned) -> None:
        self._run.poisoned.append(event.group)
        healthy = event.group not in self._run.trial.poison
        assert not healthy, f"group {event.group} was dropped as poison, but it kills no worker: {event.reason}"

    async def _check(self, fleet: RunningFleet) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.invariants.watch(), name="invariants")
            tasks.create_task(self._waits.watch(fleet), name="waits")


def run_trial(trial: Trial) -> TrialRun:
    """Runs a trial on a virtual loop of its own; the same trial does the same each time. Raises AssertionError,
    AsyncrlError or Deadlock when an invariant does not hold, or when no fault explains an error."""

    async def main() -> TrialRun:
        run = TrialRun(trial)
        await run.run()
        return run

    return virtual_loop.run(main())


class WaitChecks:
    """Checks the age of groups in flight at every event, and calls without an answer periodically. groups: in flight
    at the start. Raises AssertionError."""

    def __init__(self, faults: FaultInjection, groups: Iterable[int]) -> None:
        self._faults = faults
        self._drawn = dict.fromkeys(groups, faults.now())

    def observe(self, event: Event) -> None:
        if isinstance(event, Drawn):
            self._drawn[event.group] = self._faults.now()
        if isinstance(event, GroupFinished):
            self._drawn.pop(event.group, None)
        self._check_ages()

    async def watch(self, fleet: RunningFleet) -> None:
        """Checks until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_PERIOD)
            self._check_ages()
            for replicas in fleet.workers.values():
                for worker in replicas:
                    self._check_calls(worker)

    def _check_ages(self) -> None:
        group, drawn = next(iter(self._drawn.items()), (0, self._faults.now()))
        age = self._faults.now() - drawn
        # The limit of a trial is never below the common one, and this is asked at every event.
        if age > AGE_LIMIT:
            assert age <= self._faults.age_limit(), f"group {group} has been in flight for {age:g} s"

    def _check_calls(self, worker: RemoteWorker) -> None:
        """Checks that every call to this worker ends in time, and that no link holds more calls than its credit."""
        now = asyncio.get_running_loop().time()
        for call in worker.outstanding.values():
            waited = now - max(call.since, worker.last_answer_at)
            limit = self._faults.call_limit(call.method)
            assert waited <= limit, f"{call.method} has waited {waited:g} s for {worker.name}"
        for lane in Lane:
            link = worker.channels.get(lane)
            if isinstance(link, Client):
                waiting = len(link._pending) + len(link._abandoned)
                assert waiting <= CREDIT, f"{waiting} calls wait for {link.peer}, more than its credit"
