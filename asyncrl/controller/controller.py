"""What runs a page: everything between gate, journal and fleet. The one writer of the journal.

    draw ──> a task a group: the page's roll_out ──> generated ──> ready ─┐
      ^                (a worker dies: a new attempt)                      v
      └───────────────────── trained <── the page's train <── iterations: Gate.pick
                                └──> Publisher: new weights to generation, beside everything else

Waits of its own have no deadline: what they wait for is a call with one, and the watchdog sees when nothing moves.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, Self

from asyncrl.books import Books, lies_at
from asyncrl.config import Config, Mismatch
from asyncrl.errors import PageError, first
from asyncrl.events import DroppedByPage, Event, Observe, WeightsHandedOver
from asyncrl.fleet import Fleet
from asyncrl.foresight import Foresight
from asyncrl.groups import IN_FLIGHT, OPEN
from asyncrl.iteration import Iteration, Iterations
from asyncrl.ledger import Journal
from asyncrl.mismatch import NO_BOUNDS
from asyncrl.notices import Notices
from asyncrl.objectives.advantages import Advantages
from asyncrl.page_checks import PageChecks
from asyncrl.protocols.batch import BatchRef, Cuts
from asyncrl.protocols.messages import Score, StepReport, ValueReport, with_cost
from asyncrl.publishing import Publisher
from asyncrl.rolling import Attempt, Prompts, Rolling, Sampling
from asyncrl.staleness import Cut, Gate, Stage
from asyncrl.suspects import Suspects
from asyncrl.waiting import waiting_at

REMEMBERED_DEAD = 64
"""Instances whose rows may still be in a batch that is being trained: far more than die during one step."""

HANDED_IN = (Stage.READY, Stage.TRAINING, Stage.TRAINED)

LAST_NOTICES = 1.0
"""Seconds for the last notices: their readers end too, so that one who cannot be told at once need not be."""


@dataclass(frozen=True, slots=True)
class Page:
    """An algorithm: two plain async functions.

    roll_out(fleet, gate, group) returns when every sample of the group was handed to `gate.ready`; it may be cancelled
    and called again. train(fleet, gate) returns when `gate.iterations()` ends.
    """

    roll_out: Callable[[Fleet, "Controller", Attempt], Awaitable[None]]
    train: Callable[[Fleet, "Controller"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a run ends, and what it waits for.

    steps: version after which it ends. finish: whether what is in flight then is abandoned, or trained in further
    steps. publish_deadline: seconds a reader may hold on to an older version. mismatch: bounds that warn or end it.
    """

    steps: int
    finish: Literal["abandon", "drain"] = "abandon"
    publish_deadline: float = 10.0
    mask_truncated: bool = False
    mismatch: Mismatch = NO_BOUNDS

    @classmethod
    def of(cls, config: Config) -> Self:
        deadline = config.staleness.publish_deadline
        return cls(config.steps, config.finish, deadline, config.algorithm.mask_truncated, config.mismatch)


async def nothing_between(version: int) -> None:
    """Does nothing between iterations."""


def ignore(_: object) -> None:
    """Observes, or evicts, nothing."""


class Controller:
    """Runs a page on a fleet; on the page it is called `gate`.

    gate, journal: as new, or as restored from a checkpoint; from here on changed by this controller only.
    between: awaited with the version while no iteration runs, before the first draw and after each iteration: the
    place for a checkpoint. observe: told every event. evict: told a reader of weights that has to be killed.
    """

    def __init__(
        self,
        gate: Gate,
        journal: Journal,
        fleet: Fleet,
        prompts: Prompts,
        sampling: Sampling,
        advantages: Advantages,
        schedule: Schedule,
        *,
        between: Callable[[int], Awaitable[None]] = nothing_between,
        observe: Observe = ignore,
        evict: Callable[[str], None] = ignore,
    ) -> None:
        self._gate, self._fleet, self._prompts, self._sampling = gate, fleet, prompts, sampling
        self._schedule, self._between = schedule, between
        self._drawable, self._pickable = asyncio.Event(), asyncio.Event()
        self._notices = Notices(fleet, lambda: gate.oldest, self._drawable.set)
        self._books = Books(gate, journal, observe, self._notices.release, self._move)
        self._checks, self._observe = PageChecks(fleet), observe
        self._suspects = Suspects()
        self._publisher = Publisher(fleet, schedule.publish_deadline, self._handed_over, evict)
        self._iterations = Iterations(
            self._books,
            advantages,
            sampling.epoch,
            self._rows_lost,
            mask_truncated=schedule.mask_truncated,
            mismatch=schedule.mismatch,
        )
        self.staleness = self._iterations.staleness
        self._foresight = Foresight(fleet.training, self._books, lambda: self._iterations.cuts)
        self._stopping, self.over = False, False
        self._dead: deque[str] = deque(maxlen=REMEMBERED_DEAD)

    @property
    def version(self) -> int:
        return self._gate.version

    # ---- the run -----------------------------------------------------------------------------------------

    async def run(self, page: Page) -> None:
        """From the first draw to the last step, with a clean record of what is in flight at the end.

        Raises:
            FleetFailed: the trainer was lost.
            NonFiniteLoss, OnlyTruncated, PolicyMismatch, JournalError, RemoteError, RewardError: as the page or the
                books meet them.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._run(page, tasks)
        except BaseExceptionGroup as errors:
            raise (error := first(errors)) from error.__cause__
        self._books.close()

    async def _run(self, page: Page, tasks: asyncio.TaskGroup) -> None:
        self._running = asyncio.current_task()
        self._rolling = Rolling(
            self._books,
            self._prompts,
            self._sampling,
            self._suspects,
            lambda group: page.roll_out(self._fleet, self, group),
            tasks,
        )
        self._publisher.announce(await self._fleet.training.published())
        beside = [
            tasks.create_task(self._publisher.run(), name="publish weights"),
            tasks.create_task(self._notices.run(), name="send notices"),
            tasks.create_task(self._foresight.run(), name="foresee"),
            tasks.create_task(self._draw(), name="draw groups"),
        ]
        await page.train(replace(self._fleet, training=self._foresight.training), self)
        self._rolling.stop()
        for task in beside:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_NOTICES):
                await self._notices.flush()

    def standing(self) -> list[str]:
        """What the page does and waits for, for whoever looks at a run in which nothing moves."""
        counts = ", ".join(
            f"{count} {stage.value}" for stage, count in self._gate.counts().items() if stage in IN_FLIGHT
        )
        lines = [f"the page, at version {self.version}: samples {counts}"]
        for group, task in list(self._rolling.alive.items())[:1]:
            open_members = self._gate.members(group, Stage.RUNNING, Stage.SCORING)
            lines.append(f"  roll_out of group {group} has not ended for members {open_members}; {_waits(task)}")
        return [*lines, f"  train {_waits(self._running)}"]

    def stop(self) -> None:
        """End after the iteration that runs now, as if the steps had been reached. What is in flight is abandoned."""
        self._stopping = True
        self._move()

    async def _draw(self) -> None:
        await self._drawable.wait()
        for group in self._gate.groups():
            if self._gate.members(group, Stage.RUNNING):
                self._rolling.start(group)
        while True:
            self._rolling.start_again()
            while self._may_draw():
                self._rolling.start(self._books.draw())
            self._notices.idle_because("blocked")
            self._drawable.clear()
            await self._drawable.wait()

    def _may_draw(self) -> bool:
        """Also waits for services to hear what they need not keep: each has room for so many rows and no more."""
        gate, rows = self._gate, self._gate.in_flight + self._gate.awaited + self._notices.unreleased
        return gate.may_draw() and rows + gate.config.rows <= gate.config.kept

    def _move(self) -> None:
        """Something changed: perhaps a group may be drawn, perhaps a batch is complete."""
        self._drawable.set()
        self._pickable.set()
        self._foresight.moved()

    # ---- the page's side ---------------------------------------------------------------------------------

    def generated(self, samples: BatchRef) -> None:
        """Samples of one group left the engine."""
        self._books.generated(samples)

    def holds(self, samples: BatchRef) -> BatchRef:
        """Another service made columns of the samples; they live as long as their tokens. Returns the samples."""
        for row in samples:
            self._books.holds(row)
        return samples

    def ready(self, samples: BatchRef, scores: Sequence[Score], costs: Sequence[Score] | None = None) -> None:
        """Samples are judged: each waits for training, or is dropped when it has no reward, or none of `costs`.

        Raises PageError: a score, a cost or a column that training needs is missing, or a sample was dropped before.
        """
        self._checks.ready(samples, scores, costs)
        if costs is None:
            for row, score in zip(samples, scores, strict=True):
                self._books.scored(row, score)
            return
        for row, score, cost in zip(samples, scores, costs, strict=True):
            self._books.scored(row, with_cost(score, cost), cost.reward)

    def compared(self, greedy: BatchRef, scores: Sequence[Score]) -> None:
        """The greedy answer of a group is judged: its samples, which wait for that, are compared with its reward. The
        answer itself is done with."""
        self._checks.scores("compared", greedy, scores)
        for row, score in zip(greedy, scores, strict=True):
            self._books.compared(row, score)

    def drop(self, samples: BatchRef, reason: str) -> None:
        """Samples that were generated and shall not train: counted under this reason, and in no baseline. Those of an
        old attempt, and those that the gate has dropped already, stay as they are.

        Raises PageError: there is no reason, or a sample was handed to `ready` before.
        """
        self._checks.dropping(reason)
        for row in samples:
            group = row.group
            if self._gate.finished(group) or row.attempt != self._books.attempt(group):
                continue
            if row.member in self._gate.members(group, *HANDED_IN):
                raise PageError(f"gate.drop got sample {row.key}, which was handed to `gate.ready`: call one of them")
            if row.member in self._gate.members(group, *OPEN):
                self._checks.dropped(row, self._rolling.alive)
                self._books.drop(group, (row.member,), reason)
                self._observe(DroppedByPage(group, (row.member,), reason))

    def undone(self, group: Attempt) -> str:
        """What this attempt, were it over, would have left undone; empty: nothing, or it was overtaken."""
        number = group.prompts.id
        if self._gate.finished(number) or self._books.attempt(number) != group.prompts.attempt:
            return ""
        running, scoring = (self._gate.members(number, stage) for stage in (Stage.RUNNING, Stage.SCORING))
        if running or scoring:
            function, members = ("generated", running) if running else ("ready", scoring)
            return f"samples {members} of group {number} were not handed to `gate.{function}`"
        greedy = self._gate.awaits(number)
        return f"the greedy answer of group {number} was not handed to `gate.compared`" if greedy else ""

    async def iterations(self) -> AsyncIterator[Iteration]:
        """One training iteration after the other, each when the gate has a batch for it."""
        await self._between(self.version)
        self._move()
        while (picked := await self._next_batch()) is not None:
            iteration = self._iterations.begin(picked)
            self._foresight.began()
            yield iteration
            if self._iterations.cuts is not None:
                raise PageError("call gate.trained(report) in each iteration, `with iteration as cuts`")
            await self._between(self.version)
        self.over = True

    def credit(self, cuts: Cuts, advantages: Sequence[float]) -> Cuts:
        """The cuts of the running iteration with advantages of your own, one a row of `cuts.batch`, to train instead.
        Journal and samples have these, too.

        Raises PageError: other cuts, another number of advantages, one that is not finite, or a critic gives each token
        its own.
        """
        if self._fleet.critic is not None:
            raise PageError(
                "gate.credit gives a sample one advantage, and here a critic gives each token its own from the "
                'sample\'s reward: write another algorithm.advantage than "gae", or hand another score to gate.ready'
            )
        return self._iterations.credit(cuts, advantages)

    def trained(self, report: StepReport, *beside: ValueReport) -> None:
        """The trainer's report on the cuts of the running iteration, and the critics'; new weights are announced.

        Raises PageError: no iteration runs, or this is no report.
        """
        if not isinstance(report, StepReport):
            raise PageError(
                f"gate.trained got a {type(report).__name__}: hand it what `await fleet.training.step(cuts)` answered"
            )
        if self._iterations.cuts is None:
            raise PageError(
                "gate.trained was called twice, or after its iteration had ended: call it once in each "
                "`with iteration as cuts`"
            )
        for learnt in beside:
            report = replace(report, metrics={**report.metrics, **learnt.metrics})
        self._iterations.done(report)
        if report.published is not None:
            self._publisher.announce(report.published)

    async def _next_batch(self) -> tuple[Cut, ...] | None:
        while not self._over():
            self._pickable.clear()
            if (picked := self._books.pick()) is not None:
                return picked
            if self._gate.exhausted:
                return None
            await self._pickable.wait()
        return None

    def _over(self) -> bool:
        if self._stopping:
            return True
        if self.version < self._schedule.steps:
            return False
        self._gate.stop_drawing()
        self._notices.idle_because("starved")
        return self._schedule.finish == "abandon"

    # ---- workers come and go -----------------------------------------------------------------------------

    def worker_lost(self, instance: str, why: str, running: Iterable[int] = ()) -> None:
        """A worker died while it worked for these groups; what was read from it, or ran there, begins again."""
        self._dead.append(instance)
        self._publisher.forget(instance)
        if (guilty := self._suspects.died(running, self._gate.groups())) is not None:
            self._rolling.poison(guilty, f"{instance}: {why}")
        for group in self._books.groups_at(instance):
            self._rolling.lost(group, f"{instance}: {why}")

    def worker_lives(self, service: str, instance: str) -> None:
        """A worker takes calls; a reader of weights is to be handed them."""
        if service == "generation":
            self._publisher.join(instance)

    async def worker_started(self, service: str) -> None:
        """A worker came up after the first ones; a reader of weights is handed the newest."""
        if service == "generation":
            self._publisher.announce(await self._fleet.training.published())

    def _handed_over(self, event: Event) -> None:
        """Of a version of the weights, or that it is overdue."""
        self._observe(event)
        if isinstance(event, WeightsHandedOver) and event.canary is not None:
            self._iterations.handed_over(event.canary)

    def _rows_lost(self, cuts: Cuts, why: str) -> None:
        """Groups of the cuts with rows at a dead worker; if none of them is known to be dead, all of the cuts."""
        at_dead = [row.group for row in cuts.batch if any(lies_at(row, instance) for instance in self._dead)]
        for group in dict.fromkeys(at_dead or [row.group for row in cuts.batch]):
            self._rolling.lost(group, why)


def _waits(task: "asyncio.Task[None] | None") -> str:
    where = waiting_at(task) if task is not None else ""
    return f"waits in {where}" if where else "waits for asyncrl"
