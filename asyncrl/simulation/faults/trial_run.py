"""Runs a trial from its first draw to its last step, through all deaths of its controller."""

import asyncio
import itertools
import random
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, cast

from asyncrl.algorithms import grpo, remax
from asyncrl.config.schema import Config, FleetConfig, GenerationConfig, ModelConfig, TaskConfig
from asyncrl.controller.controller import Controller, Schedule
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.audit import audit_store
from asyncrl.controller.journal.checkpoints import ResumePlan, commit, plan_resume, resume
from asyncrl.controller.journal.journal_records import Trained
from asyncrl.controller.journal.ledger import Journal, surviving
from asyncrl.controller.observers.events import Event, GroupFinished, GroupPoisoned
from asyncrl.controller.rollouts import Sampling
from asyncrl.controller.worker_events import WorkerEvents
from asyncrl.errors import DeadlineExceeded, FleetFailed, PeerLost, root_cause
from asyncrl.fleet.fleet import Platform, RunningFleet, ServiceSpec, fleet_on
from asyncrl.fleet.handle import GROUP_MARGIN
from asyncrl.fleet.replicas import DEATH_NOTICE
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.objectives.advantages import GreedyBaseline, GroupBaseline
from asyncrl.protocols.contracts import Generation, Reference, Training
from asyncrl.simulation import virtual_loop
from asyncrl.simulation.faults.fault_launcher import FaultyLauncher
from asyncrl.simulation.faults.fault_schedule import FaultSchedule
from asyncrl.simulation.faults.fault_services import (
    TicketReward,
    TrialGeneration,
    TrialReference,
    TrialReward,
    TrialTraining,
)
from asyncrl.simulation.faults.fault_wire import FaultyWire, ProcessWire
from asyncrl.simulation.faults.ground_truth import GroundTruth, TrialViolation
from asyncrl.simulation.faults.slow_disk import SlowDisk
from asyncrl.simulation.faults.trial_checks import CHECK_PERIOD, TrialChecks
from asyncrl.simulation.faults.trial_plan import HEARTBEAT, MOST_TOKENS, Fault, Trial
from asyncrl.simulation.invariants import Invariants

GROUP_DEADLINE = 40.0
CALL_DEADLINE = 60.0
START_DEADLINE = 30.0
TICKET_PAUSE = 2.0
BROKEN_LINK_DEADLINE = 45.0
"""Seconds until a link that lost or repeated a message is ended: a start deadline, some heartbeats, and the end of a
process that ignores a stop. It holds only while no clock skips and no link stalls."""
LIFE_LIMIT = 3_000.0
"""Seconds of virtual time that one life of a controller may take."""
AGE_LIMIT = 120.0
AGE_LIMIT_PER_FAULT = 100.0
"""Seconds that a group may be in flight without faults, and in addition for each injected fault: a deadline, a restart
and the wait for the next step."""

CONFIG = Config(
    model=ModelConfig(name="none"),
    task=TaskConfig(prompts="none"),
    generation=GenerationConfig(deadline=GROUP_DEADLINE),
    fleet=FleetConfig(call_deadline=CALL_DEADLINE, start_deadline=START_DEADLINE, watchdog=1e9),
)


@dataclass
class TrialOutcome:
    """Holds what a trial did.

    digest: hash of all events and messages. lives: how often a controller was started. oldest_age: seconds that a group
    was in flight at most. injected: the faults that were reached. poisoned: groups dropped as poison. ends: how each
    life ended.
    """

    digest: str = ""
    version: int = 0
    lives: int = 0
    messages: int = 0
    seconds: float = 0.0
    oldest_age: float = 0.0
    injected: list[Fault] = field(default_factory=list)
    poisoned: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


class TrialRun:
    """Owns everything that outlives a controller: disk, clock, fault schedule and ground truth."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.loop = cast(virtual_loop.VirtualLoop, asyncio.get_running_loop())
        self.chance = random.Random(f"disk {trial.seed}")
        self.schedule = FaultSchedule(trial, self._inject, self._watch_broken_link)
        limit = None if trial.policy == "admit" else trial.limit
        self.truth = GroundTruth(limit, random.Random(f"rows {trial.seed}"))
        self.events = sha256()
        self.skipped = 0.0
        self.outcome = TrialOutcome()
        self.names = itertools.count(1)
        self.tickets = itertools.count(1)
        self.disk = SlowDisk()
        self.life: ControllerLife

    def now(self) -> float:
        """Returns loop time without what the clock skipped."""
        return self.loop.time() - self.skipped

    def skip(self, seconds: float) -> None:
        """Lets time pass while nothing runs."""
        self.skipped += seconds
        self.loop.skip(seconds)

    def age_limit(self) -> float:
        """Returns the seconds that a group may be in flight now."""
        injected = self.schedule.injected
        return AGE_LIMIT + AGE_LIMIT_PER_FAULT * len(injected) + sum(fault.seconds for fault in injected)

    def call_limit(self) -> float:
        """Returns the seconds that a call may be outstanding now, by the clock that jumps."""
        return max(CALL_DEADLINE, GROUP_DEADLINE + GROUP_MARGIN) + 2 * DEATH_NOTICE + CHECK_PERIOD + self.skipped

    # ---- faults ------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        self.loop.after_turns(fault.turns, partial(self._inject_now, fault, self.life))

    def _inject_now(self, fault: Fault, life: "ControllerLife") -> None:
        if life is not self.life or life.over:
            return
        match fault.kind:
            case "kill":
                life.launcher.kill_one(fault.target)
            case "controller":
                life.kill(power_cut=fault.power)
            case "stall":
                self.schedule.stall(fault.target, fault.seconds)
            case "row":
                self.truth.lose_row(fault.target)
            case "stuck":
                self.truth.get_stuck(fault.seconds)
            case "jump":
                self.skip(fault.seconds)
            case "disk":
                self.disk.slow_down(fault.seconds)

    def _watch_broken_link(self, address: str) -> None:
        """Expects that the link to a worker, and the worker, end after a message was lost or came twice. A broken link
        between two workers ends too, but nothing checks that."""
        instance, _, lane = address.removeprefix("inproc://").rpartition(".")
        if lane != "data":
            self.loop.call_later(BROKEN_LINK_DEADLINE, self._check_ended, instance, self.life, self.skipped)

    def _check_ended(self, instance: str, life: "ControllerLife", skipped: float) -> None:
        stalled = any(fault.kind == "stall" for fault in self.schedule.injected)
        timely = skipped == self.skipped and not stalled
        if timely and life is self.life and not life.over and life.launcher.runs(instance):
            self.truth.report(
                f"{instance} still runs {BROKEN_LINK_DEADLINE:g} s after a message to or from it was lost or came twice"
            )

    # ---- lives -------------------------------------------------------------------------------------------

    async def run(self) -> TrialOutcome:
        """Raises TrialViolation, or the error of a controller that no fault explains."""
        before = asyncio.all_tasks()
        while True:
            self.outcome.lives += 1
            if await self._live(before):
                break
            assert self.outcome.lives <= len(self.schedule.injected) + 1, f"too many deaths: {self.outcome.ends}"
        self._check_history()
        return self.outcome

    async def _live(self, before: set[asyncio.Task[Any]]) -> bool:
        """Runs one controller; returns whether it came to the end of the run."""
        injected = len(self.schedule.injected)
        self.disk.connect_clock(self.skip)
        self.schedule.end_stalls()
        life = self.life = ControllerLife(self)
        await asyncio.wait([life.task], timeout=LIFE_LIMIT)
        life.retrieve_error()
        self.check_truth()
        if not life.task.done():
            raise TrialViolation(f"the run did not end: {self.loop.pending()}")
        await life.clean_up()
        left = [task.get_name() for task in asyncio.all_tasks() - before]
        assert not left, f"tasks are left: {left}"
        done = life.finished(len(self.schedule.injected) > injected)
        self.outcome.ends.append(life.end)
        return done

    def check_truth(self) -> None:
        """Raises TrialViolation when the ground truth saw one."""
        if self.truth.violation:
            raise TrialViolation(self.truth.violation)

    def _check_history(self) -> None:
        """Checks that the journal says exactly what was trained."""
        audit = audit_store(self.disk)
        assert audit.ok, str(audit)
        records = [framed.record for framed in surviving(self.disk) if isinstance(framed.record, Trained)]
        journaled = {
            made.version: tuple((group, m) for group, members in made.cuts for m in members) for made in records
        }
        assert journaled == self.truth.steps, f"the journal says {journaled}; trained was {self.truth.steps}"
        assert max(journaled) >= self.trial.steps, f"the run ended at version {max(journaled)}"
        outcome, schedule = self.outcome, self.schedule
        self.events.update(schedule.digest.digest())
        outcome.digest = self.events.hexdigest()[:32]
        outcome.messages = schedule.sent
        outcome.version = max(journaled)
        outcome.injected = schedule.injected
        outcome.seconds = self.now()


class ControllerLife:
    """Runs one controller with its fleet, from the beginning or the last checkpoint. end: how it ended, in words."""

    def __init__(self, run: TrialRun) -> None:
        self._run = run
        self._trial = run.trial
        wire = FaultyWire(run.schedule)
        self._wire = ProcessWire(wire)
        seed = f"processes {run.trial.seed} {run.outcome.lives}"
        self.launcher = FaultyLauncher(wire, seed, remote=run.trial.remote, on_end=run.truth.ended)
        self.over = False
        self.end = "finished"
        self._power_cut: bool | None = None
        self.task = asyncio.get_running_loop().create_task(self._live(), name="controller")

    def kill(self, *, power_cut: bool) -> None:
        """Kills the controller and its workers; nothing that their tasks still do has an effect."""
        self.over = True
        self._power_cut = power_cut
        self.end = "power cut" if power_cut else "controller killed"
        self._run.disk.freeze()
        self._wire.close()
        self.launcher.kill_all()
        self.task.cancel()

    async def clean_up(self) -> None:
        """Waits until no task of this life is left."""
        self.over = True
        self.launcher.kill_all()
        await self.launcher.wait_until_idle()

    def retrieve_error(self) -> None:
        """Retrieves the error of the task, or asyncio would log that nothing did."""
        if self.task.done() and not self.task.cancelled():
            self.task.exception()

    def finished(self, injected: bool) -> bool:
        """Returns whether the run is done; otherwise the next life goes on. Raises an error that no fault explains."""
        run = self._run
        if self._power_cut is not None:
            run.disk = run.disk.after_failure(self._power_cut, run.chance)
            return False
        if self.task.cancelled():
            raise TrialViolation("the controller was cancelled although no fault killed it")
        error = self.task.exception()
        if error is None:
            return True
        if not isinstance(error, FleetFailed if injected else ()) and not self._is_late(error):
            raise error
        self.end = repr(error)
        run.disk = run.disk.after_failure(False, run.chance)
        return False

    def _is_late(self, error: BaseException) -> bool:
        """Returns whether faults cost so much time that a deadline of the trainer, or of a start, may end the run."""
        lost_time = any(fault.kind in ("jump", "disk", "stall", "lose") for fault in self._run.schedule.injected)
        return isinstance(error, DeadlineExceeded) and lost_time

    # ---- the controller's process ------------------------------------------------------------------------

    async def _live(self) -> None:
        run, plan = self._run, plan_resume(self._run.disk)
        self._resume(plan)
        run.truth.resumed(self._gate.version)
        facts = RunFacts(
            run="feedbeef",
            run_dir="/nowhere",
            model_dir="/nowhere",
            incarnation=plan.incarnation if plan else 0,
            weights_arena="none",
            config=CONFIG,
            checkpoint_dir=plan.directory if plan else None,
            heartbeat=HEARTBEAT if self._trial.remote else None,
        )
        platform = Platform(self._wire, lambda _: self.launcher, lambda: f"{next(run.names):08x}", lambda _: None)
        async with fleet_on(platform, self._specs(), facts, report=lambda _: None, resume="the same") as fleet:
            await self._train(fleet, facts.incarnation)

    def _resume(self, plan: ResumePlan | None) -> None:
        disk, config = self._run.disk, self._trial.gate
        self._committed = plan.version if plan else -1
        self._journal = resume(disk, plan) if plan else Journal(disk)
        self._gate = Gate(config, plan.version, plan.next_group) if plan else Gate(config)
        for group in plan.groups if plan else ():
            self._gate.restore(group)

    def _specs(self) -> list[ServiceSpec]:
        trial, truth, disk = self._trial, self._run.truth, self._run.disk
        specs = [
            ServiceSpec("generation", Generation, lambda c: TrialGeneration(c, trial, truth), trial.generators),
            ServiceSpec("reward", TicketReward, lambda c: TrialReward(c, trial, truth), trial.scorers),
            ServiceSpec("training", Training, lambda c: TrialTraining(c, trial, truth, disk)),
        ]
        if trial.reference:
            specs.append(ServiceSpec("reference", Reference, lambda c: TrialReference(c, trial, truth)))
        return specs

    async def _train(self, fleet: RunningFleet, incarnation: int) -> None:
        run = self._run
        self._training = fleet.fleet.training
        self._incarnation = incarnation
        self._progressed = fleet.supervisor.progressed
        invariants = Invariants(self._gate, self._journal, run.check_truth, thorough=True)
        self._checks = TrialChecks(invariants, fleet.workers, run.call_limit, run.age_limit, run.now)
        self._checks.in_flight(self._gate.groups())
        controller = self._controller(fleet, incarnation)
        try:
            async with asyncio.TaskGroup() as tasks:
                watches = {
                    "worker events": WorkerEvents(fleet, controller).follow(),
                    "checks": self._checks.watch(),
                    "tickets": self._count_tickets(fleet.handle("reward", TicketReward)),
                }
                beside = [tasks.create_task(watch, name=name) for name, watch in watches.items()]
                await controller.run(remax.ALGORITHM if self._trial.greedy else grpo.ALGORITHM)
                await self._between(self._gate.version, last=True)
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from None
        invariants.check()
        run.outcome.oldest_age = max(run.outcome.oldest_age, self._checks.oldest_age)

    def _controller(self, fleet: RunningFleet, incarnation: int) -> Controller:
        trial = self._trial
        return Controller(
            self._gate,
            self._journal,
            fleet.fleet,
            prompts=lambda group: (f"prompt {group}", {}),
            sampling=Sampling(1.0, MOST_TOKENS, GROUP_DEADLINE, trial.seed, incarnation),
            advantages=GreedyBaseline() if trial.greedy else GroupBaseline(),
            schedule=Schedule(trial.steps, trial.finish),
            between=self._between,
            observe=self._observe,
            kill=fleet.supervisor.kill,
        )

    async def _count_tickets(self, reward: TicketReward) -> None:
        """Makes calls that must not be repeated, each with its own ticket; faults lose some of them."""
        while True:
            with suppress(PeerLost, DeadlineExceeded):
                await reward.count(next(self._run.tickets))
            await asyncio.sleep(TICKET_PAUSE)

    async def _between(self, version: int, last: bool = False) -> None:
        due = self._committed < 0 or version - self._committed >= self._trial.checkpoint_every
        if due or (last and version > self._committed):
            await commit(
                self._journal, lambda place: self._training.checkpoint(place, self._incarnation, version), keep=2
            )
            self._committed = version

    def _observe(self, event: Event) -> None:
        if self.over:
            return
        if isinstance(event, GroupPoisoned):
            self._check_poison(event)
        self._run.events.update(f"{self._run.loop.time()!r} {event!r}\n".encode())
        if isinstance(event, GroupFinished) and not event.poison:
            self._progressed()
        self._checks.observe(event)

    def _check_poison(self, event: GroupPoisoned) -> None:
        poisoned = self._run.outcome.poisoned
        poisoned.append(event.group)
        healthy = sum(group != self._trial.poison for group in poisoned)
        most = len(self._run.schedule.injected) * self._gate.config.cap
        assert healthy <= most, f"group {event.group} was dropped as poison, but it kills no worker: {event.reason}"


def run_trial(trial: Trial) -> TrialOutcome:
    """Runs a trial on a virtual loop of its own; the same trial gives the same outcome.

    Raises:
        AssertionError, AsyncrlError, Deadlock: an invariant does not hold, or an error that no fault explains.
    """

    async def main() -> TrialOutcome:
        return await TrialRun(trial).run()

    return virtual_loop.run(main())
