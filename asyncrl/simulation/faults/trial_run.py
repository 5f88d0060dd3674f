"""A run in the faulty world, from its first draw to its last step, through all its deaths."""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from asyncrl import virtual
from asyncrl.algorithms import grpo, remax
from asyncrl.audit import audit_store
from asyncrl.checkpoint import ResumePlan, commit, plan_resume, resume
from asyncrl.config import Config, Model, Task
from asyncrl.config import Fleet as FleetConfig
from asyncrl.config import Generation as GenerationConfig
from asyncrl.controller import Controller, Schedule
from asyncrl.errors import DeadlineExceeded, FleetFailed, PeerLost, first
from asyncrl.events import Event, GroupFinished, GroupPoisoned
from asyncrl.faulty.checks import LOOKS, Checks
from asyncrl.faulty.disk import Disk
from asyncrl.faulty.launcher import FaultyLauncher
from asyncrl.faulty.plan import HEARTBEAT, MOST_TOKENS, Fault, Trial
from asyncrl.faulty.truth import Truth
from asyncrl.faulty.wire import FaultyWire, Part, Weather
from asyncrl.faulty.workers import Counting, FaultyGeneration, FaultyReference, FaultyReward, FaultyTraining
from asyncrl.fleet import Ground, RunningFleet, ServiceSpec, fleet_on
from asyncrl.handle import GROUP_MARGIN
from asyncrl.invariants import Invariants
from asyncrl.launch import RunFacts
from asyncrl.ledger import Journal, surviving
from asyncrl.news import News
from asyncrl.objectives.advantages import GreedyBaseline, GroupBaseline
from asyncrl.protocols.contracts import Generation, Reference, Training
from asyncrl.records import Trained
from asyncrl.rolling import Sampling
from asyncrl.staleness import Gate
from asyncrl.workers import DEATH_NOTICE

GROUP_DEADLINE = 40.0
CALL_DEADLINE = 60.0
START_DEADLINE = 30.0
TICKET_PAUSE = 2.0
MISTRUST = 45.0
"""Seconds until a link is ended that lost or repeated a message: a start deadline, some heartbeats, and the end of a
process that does not listen. No clock skips and no link stalls meanwhile."""
LONGEST = 3_000.0
"""Seconds of virtual time that one life of a controller may take."""
AGE, AGE_PER_FAULT = 120.0, 100.0
"""Seconds a group may be in flight in a world without faults, and for each that struck: a deadline, a restart and the
wait for the next step."""

CONFIG = Config(
    model=Model(name="none"),
    task=Task(prompts="none"),
    generation=GenerationConfig(deadline=GROUP_DEADLINE),
    fleet=FleetConfig(call_deadline=CALL_DEADLINE, start_deadline=START_DEADLINE, watchdog=1e9),
)


class Wrong(AssertionError):
    """The world saw what must not be. The message says what."""


@dataclass
class Outcome:
    """What a trial did. digest: of all events, messages and the journal; lives: how often a controller was started;
    eldest: seconds that a group was in flight at most; struck: faults that did; poisoned: groups dropped as that."""

    digest: str = ""
    version: int = 0
    lives: int = 0
    messages: int = 0
    seconds: float = 0.0
    eldest: float = 0.0
    struck: list[Fault] = field(default_factory=list)
    poisoned: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


class World:
    """Everything that outlives a controller."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.loop: virtual.VirtualLoop = asyncio.get_running_loop()  # type: ignore[assignment]
        self.chance = random.Random(f"world {trial.seed}")
        self.weather = Weather(trial, self._strike, self._broken)
        self.truth = Truth(None if trial.policy == "admit" else trial.limit)
        self.events = sha256()
        self.skipped = 0.0
        self.outcome = Outcome()
        self._instances = self._tickets = 0
        self.disk = Disk()
        self.life: Life

    def now(self) -> float:
        """Loop time without what the clock skipped."""
        return self.loop.time() - self.skipped

    def skip(self, seconds: float) -> None:
        self.skipped += seconds
        self.loop.skip(seconds)

    def unique(self) -> str:
        """Names are used once."""
        self._instances += 1
        return f"{self._instances:08x}"

    def ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def oldest(self) -> float:
        """Seconds a group may be in flight now."""
        struck = self.weather.struck
        return AGE + AGE_PER_FAULT * len(struck) + sum(fault.seconds for fault in struck)

    def patience(self) -> float:
        """Seconds a call may be outstanding now, by the clock that jumps: those to generation take the longest."""
        return max(CALL_DEADLINE, GROUP_DEADLINE + GROUP_MARGIN) + 2 * DEATH_NOTICE + LOOKS + self.skipped

    # ---- faults ------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self.loop.after_turns(fault.turns, partial(self._happen, fault, self.life))

    def _happen(self, fault: Fault, life: "Life") -> None:
        if life is not self.life or life.over:
            return
        match fault.kind:
            case "kill":
                life.launcher.kill_one(fault.target)
            case "controller":
                life.kill(power=fault.power)
            case "stall":
                self.weather.stall(fault.target, fault.seconds)
            case "row":
                self.truth.lose_row(fault.target)
            case "stuck":
                self.truth.get_stuck(fault.seconds)
            case "jump":
                self.skip(fault.seconds)
            case "disk":
                self.disk.slow_down(fault.seconds)

    def _broken(self, address: str) -> None:
        """A message was lost or came twice: numbers tell, the link ends, and with it the worker. Links between workers
        end too, but nobody has to know."""
        instance, _, lane = address.removeprefix("inproc://").rpartition(".")
        if lane != "data":
            self.loop.call_later(MISTRUST, self._check_ended, instance, self.life, self.skipped)

    def _check_ended(self, instance: str, life: "Life", skipped: float) -> None:
        stalled = any(fault.kind == "stall" for fault in self.weather.struck)
        timely = skipped == self.skipped and not stalled
        if timely and life is self.life and not life.over and life.launcher.runs(instance):
            self.truth.wrong(f"{instance} is still trusted, {MISTRUST:g} s after a message was lost or came twice")

    # ---- lives -------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Raises Wrong, or whatever ended a controller that no fault explains."""
        before = asyncio.all_tasks()
        while True:
            self.outcome.lives += 1
            if await self._live(before):
                break
            assert self.outcome.lives <= len(self.weather.struck) + 1, f"more deaths than faults: {self.outcome.ends}"
        self._check_history()
        return self.outcome

    async def _live(self, before: set[asyncio.Task[Any]]) -> bool:
        """One controller; whether it came to the end of the run."""
        struck = len(self.weather.struck)
        self.disk.spin(self.skip)
        self.weather.clear_up()
        life = self.life = Life(self)
        await asyncio.wait([life.task], timeout=LONGEST)
        life.look_at_error()
        if self.truth.problem:
            raise Wrong(self.truth.problem)
        if not life.task.done():
            raise Wrong(f"the run did not end: {self.loop.pending()}")
        await life.buried()
        left = [task.get_name() for task in asyncio.all_tasks() - before]
        assert not left, f"tasks are left: {left}"
        done = life.ended(len(self.weather.struck) > struck)
        self.outcome.ends.append(life.end)
        return done

    def _check_history(self) -> None:
        """What the journal says is what was trained, and all of it."""
        audit = audit_store(self.disk)
        assert audit.ok, str(audit)
        records = [framed.record for framed in surviving(self.disk) if isinstance(framed.record, Trained)]
        told = {made.version: tuple((group, m) for group, members in made.cuts for m in members) for made in records}
        assert told == self.truth.steps, f"the journal tells {told}; trained was {self.truth.steps}"
        assert max(told) >= self.trial.steps, f"the run ended at version {max(told)}"
        outcome, weather = self.outcome, self.weather
        self.events.update(weather.digest.digest())
        outcome.digest, outcome.messages = self.events.hexdigest()[:32], weather.sent
        outcome.version, outcome.struck = max(told), weather.struck
        outcome.seconds = self.now()


class Life:
    """One controller with its fleet, from the beginning or from the last checkpoint. end: how it ended, in words."""

    def __init__(self, world: World) -> None:
        self._world, self._trial = world, world.trial
        wire = FaultyWire(world.weather)
        self._part = Part(wire)
        seed = f"processes {world.trial.seed} {world.outcome.lives}"
        self.launcher = FaultyLauncher(wire, seed, remote=world.trial.remote, on_end=world.truth.ended)
        self.over, self.end = False, "finished"
        self._killed: bool | None = None
        self._started = False
        self.task = asyncio.get_running_loop().create_task(self._run(), name="controller")

    def kill(self, *, power: bool) -> None:
        """The controller dies, and its workers with it; nothing that its tasks still do leaves a trace."""
        self.over, self._killed, self.end = True, power, "power cut" if power else "controller killed"
        self._world.disk.freeze()
        self._part.close()
        self.launcher.kill_all()
        self.task.cancel()

    async def buried(self) -> None:
        """Returns when nothing of this life runs any more."""
        self.over = True
        self.launcher.kill_all()
        await self.launcher.buried()

    def look_at_error(self) -> None:
        """Or asyncio would complain that nobody did."""
        if self.task.done() and not self.task.cancelled():
            self.task.exception()

    def ended(self, struck: bool) -> bool:
        """Whether the run is done; else the next life goes on. Raises what no fault explains."""
        world = self._world
        if self._killed is not None:
            world.disk = world.disk.found(self._killed, world.chance)
            return False
        if self.task.cancelled():
            raise Wrong("the controller was cancelled by nobody")
        error = self.task.exception()
        if error is None:
            return True
        if not isinstance(error, FleetFailed if struck else ()) and not self._late(error):
            raise error
        self.end = repr(error)
        world.disk = world.disk.found(False, world.chance)
        return False

    def _late(self, error: BaseException) -> bool:
        """Whether time itself was out of joint: then a deadline of the trainer, or of a start, may end the run."""
        lost_time = any(fault.kind in ("jump", "disk", "stall", "lose") for fault in self._world.weather.struck)
        return isinstance(error, DeadlineExceeded) and lost_time

    # ---- the controller's process ------------------------------------------------------------------------

    async def _run(self) -> None:
        world = self._world
        plan = plan_resume(world.disk)
        self._take_up(plan)
        world.truth.taken_up(self._gate.version)
        facts = RunFacts(
            run="feedbeef",
            run_dir="/nowhere",
            model_dir="/nowhere",
            epoch=plan.epoch if plan else 0,
            weights_arena="none",
            config=CONFIG,
            checkpoint_dir=plan.directory if plan else None,
            heartbeat=HEARTBEAT if self._trial.remote else None,
        )
        ground = Ground(self._part, lambda _: self.launcher, world.unique, lambda _: None)
        async with fleet_on(ground, self._specs(), facts, report=lambda _: None, resume="the same") as running:
            self._started = True
            await self._train(running, facts.epoch)

    def _take_up(self, plan: ResumePlan | None) -> None:
        disk, config = self._world.disk, self._trial.gate
        self._committed = plan.version if plan else -1
        self._journal = resume(disk, plan) if plan else Journal(disk)
        self._gate = Gate(config, plan.version, plan.next_group) if plan else Gate(config)
        for group in plan.groups if plan else ():
            self._gate.restore(group)

    def _specs(self) -> list[ServiceSpec]:
        trial, truth = self._trial, self._world.truth

        specs = [
            ServiceSpec("generation", Generation, lambda c: FaultyGeneration(c, trial, truth), trial.generators),
            ServiceSpec("reward", Counting, lambda c: FaultyReward(c, trial, truth), trial.scorers),
            ServiceSpec("training", Training, lambda c: FaultyTraining(c, trial, truth, self._world.disk)),
        ]
        if trial.reference:
            specs.append(ServiceSpec("reference", Reference, lambda c: FaultyReference(c, trial, truth)))
        return specs

    async def _train(self, running: RunningFleet, epoch: int) -> None:
        trial, world = self._trial, self._world
        self._training = running.fleet.training
        self._epoch, self._progressed = epoch, running.progressed
        invariants = Invariants(self._gate, self._journal, self._check_truth, thorough=True)
        self._checks = Checks(invariants, running.workers, world.patience, world.oldest, world.now)
        self._checks.in_flight(self._gate.groups())
        controller = Controller(
            self._gate,
            self._journal,
            running.fleet,
            prompts=lambda group: (f"prompt {group}", {}),
            sampling=Sampling(1.0, MOST_TOKENS, GROUP_DEADLINE, trial.seed, epoch),
            advantages=GreedyBaseline() if trial.greedy else GroupBaseline(),
            schedule=Schedule(trial.steps, trial.finish),
            between=self._between,
            observe=self._observe,
            evict=running.kill,
        )
        news = News(running, controller)
        try:
            async with asyncio.TaskGroup() as tasks:
                watches = {
                    "news of workers": news.follow(),
                    "checks": self._checks.watch(),
                    "tickets": self._hand_in_tickets(running.handle("reward", Counting)),
                }
                beside = [tasks.create_task(watch, name=name) for name, watch in watches.items()]
                await controller.run(remax.PAGE if trial.greedy else grpo.PAGE)
                await self._between(self._gate.version, last=True)
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise first(errors) from None
        invariants.check()
        world.outcome.eldest = max(world.outcome.eldest, self._checks.eldest)

    async def _hand_in_tickets(self, reward: Counting) -> None:
        """For ever: calls that may not be repeated, each with a ticket of its own; some are lost on the way."""
        while True:
            with suppress(PeerLost, DeadlineExceeded):
                await reward.count(self._world.ticket())
            await asyncio.sleep(TICKET_PAUSE)

    async def _between(self, version: int, last: bool = False) -> None:
        due = self._committed < 0 or version - self._committed >= self._trial.checkpoint_every
        if due or (last and version > self._committed):
            await commit(self._journal, lambda place: self._training.checkpoint(place, self._epoch, version), keep=2)
            self._committed = version

    def _observe(self, event: Event) -> None:
        if self.over:
            return
        if isinstance(event, GroupPoisoned):
            self._check_poison(event)
        self._world.events.update(f"{self._world.loop.time()!r} {event!r}\n".encode())
        if isinstance(event, GroupFinished) and not event.poison:
            self._progressed()
        self._checks.observe(event)

    def _check_poison(self, event: GroupPoisoned) -> None:
        poisoned = self._world.outcome.poisoned
        poisoned.append(event.group)
        healthy = sum(group != self._trial.poison for group in poisoned)
        most = len(self._world.weather.struck) * self._gate.config.cap
        assert healthy <= most, f"group {event.group} is poison for no fault of its own: {event.reason}"

    def _check_truth(self) -> None:
        if self._world.truth.problem:
            raise Wrong(self._world.truth.problem)


def endure(trial: Trial) -> Outcome:
    """One trial, on a virtual loop of its own. The same trial gives the same outcome.

    Raises:
        AssertionError, AsyncrlError, Deadlock: what went wrong, whatever the faults.
    """

    async def main() -> Outcome:
        return await World(trial).run()

    return virtual.run(main())
