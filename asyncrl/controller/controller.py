"""Runs an algorithm on a fleet: draws groups, rolls them out, trains batches and publishes weights, to the last step.

    draw ──> a task a group: the algorithm's roll_out ──> generated ──> ready ─┐
      ^              (a worker dies: a new attempt)                            v
      └───────────── trained <── the algorithm's train <── iterations: Gate.pick
                        └──> WeightPublisher: new weights for generation

Each loop is a task that waits for one thing at a time; another loop or a worker wakes it:

    loop         function                        waits for                         woken by
    draw         Controller._draw                room for a further group          _state_changed, RowReleases, train
    each group   Rollouts._run_group: roll_out   its samples and their scores      workers, Rollouts.lost
    train        Controller.iterations: train    a full batch, then its step       _sample_ready, then the trainer
    weights      WeightPublisher.run             a newer version                   trained, worker_started
    releases     RowReleases.run                 rows that are no longer needed    SampleTracker
    prefetch     Iterations.prefetch             the batch after the running one   _sample_ready
    workers      WorkerEvents.follow             starts and ends of workers        the supervisor of the fleet

A wait for another loop has no deadline of its own: it ends in a call to a worker that has one, and the watchdog of the
fleet reports when nothing moves. The controller is the only writer of gate and journal.
"""

import asyncio
import inspect
import itertools
import math
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Iterable, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, cast

from asyncrl.concurrency import one_error, root_cause
from asyncrl.config.schema import Config
from asyncrl.config.user_code import name_of
from asyncrl.controller.checkpointing import restore_rows
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import IN_FLIGHT, OPEN, Cut, Stage
from asyncrl.controller.iterations import CheckedTraining, Iteration, Iterations
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.observers.events import DroppedByAlgorithm, Event, Observe, WeightsHandedOver
from asyncrl.controller.observers.recorder import ShownRows
from asyncrl.controller.observers.staleness_report import StalenessReport
from asyncrl.controller.rollouts import Attempt, PromptSource, Rollouts, wait_of
from asyncrl.controller.row_releases import RowReleases
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.controller.weight_publisher import WeightPublisher
from asyncrl.errors import AlgorithmError, AsyncrlError, LostRows, TaskError
from asyncrl.fleet.fleet import Fleet
from asyncrl.lanes.host_id import UNKNOWN_DOMAIN, FaultDomain
from asyncrl.objectives.advantages import Advantages
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef, SampleName
from asyncrl.protocols.messages import Score, StepReport, ValueReport, with_cost
from asyncrl.protocols.service_contracts import RUNNING, UNDONE, Training
from asyncrl.rewards.execution.scoring import stores_token_rewards

DRAWN_AT_ONCE = 256
"""Groups drawn before other tasks run: drawing 100,000 groups takes a minute, in which the recorder and health wait."""
STEP_LOOK = 0.5
"""Seconds between two looks whether a step that changes the weights has ended."""
LAST_RELEASES = 1.0
"""Seconds for the last releases at the end of a run: the workers end too, so no answer is necessary."""


@dataclass(frozen=True, slots=True, repr=False)
class Algorithm:
    """An algorithm: two plain async functions.

    roll_out(fleet, control, group) returns when every sample of the group was handed to `control.ready`; it may be
    cancelled and called again. train(fleet, control) returns when `control.iterations()` ends. name: of a user's
    algorithm; empty for the algorithms of asyncrl.
    """

    roll_out: Callable[[Fleet, "Controller", Attempt], Awaitable[None]]
    train: Callable[[Fleet, "Controller"], Awaitable[None]]
    name: str = ""

    def __repr__(self) -> str:
        return f"Algorithm({name_of(self.roll_out)}, {name_of(self.train)})"


@dataclass(frozen=True, slots=True)
class AttributedTo:
    """Turns an error raised inside the scope into an AlgorithmError that names the user's function and the line.

    Errors of asyncrl itself and timeouts pass unchanged: a lost worker is no fault of the algorithm.
    """

    algorithm: Algorithm
    function: Literal["roll_out", "train"]

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or not self.algorithm.name:
            return
        cause = root_cause(error)
        what = f"{self.function} of {self.algorithm.name}"
        if isinstance(cause, AlgorithmError):
            raise AlgorithmError(f"{what}: {cause}{self._line(cause)}") from cause
        if isinstance(cause, Exception) and not isinstance(cause, AsyncrlError | TimeoutError):
            raise AlgorithmError(f"{what} raised {type(cause).__name__}: {cause}{self._line(cause)}") from cause

    def _line(self, cause: Exception) -> str:
        code = getattr(inspect.unwrap(getattr(self.algorithm, self.function)), "__code__", None)
        frames = traceback.extract_tb(cause.__traceback__)
        own = [frame for frame in frames if code is not None and frame.filename == code.co_filename] or frames[-1:]
        return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


COLUMNS = {
    "reference": ("reference_logprobs", "samples = control.holds(await fleet.reference.logprobs(samples))"),
    "critic": ("values", "samples = control.holds(samples.also_at(await fleet.critic.values(samples)))"),
    "cost_critic": ("cost_values", "samples = control.holds(samples.also_at(await fleet.cost_critic.values(samples)))"),
}
"""The column that the trainer reads of each sample where a service is part of the fleet, and the call that makes it."""


class AlgorithmChecks:
    """Names a mistake in what an algorithm hands to its `control` where it is made, with what to write. Remembers which
    samples the algorithm dropped of groups that still roll out. by_token: whether the trainer reads the rewards of
    single tokens."""

    def __init__(self, fleet: Fleet, by_token: bool = False) -> None:
        self._by_token = by_token
        self._needed = [service for service in COLUMNS if getattr(fleet, service) is not None]
        self._with_costs = fleet.cost is not None
        self._with_episodes = fleet.environment is not None
        self._dropped: dict[int, set[SampleName]] = {}

    def check_generated(self, samples: BatchRef) -> None:
        """Raises AlgorithmError for a sample that no environment answered to its end, in a run with one."""
        if not self._with_episodes:
            return
        for row in samples:
            if not row.finish or not any("turn_rewards" in place.columns for place in row.places):
                raise AlgorithmError(
                    f"control.generated got sample {row.key}, whose episode was not played to its end, and "
                    "environment.use names an environment: write `await play(fleet, control, group, score)`, from "
                    "asyncrl.algorithms.play_episode, in place of `fleet.generation.generate`, or leave "
                    "environment.use out"
                )

    def check_ready(self, samples: BatchRef, scores: Sequence[Score], costs: Sequence[Score] | None) -> None:
        """Raises AlgorithmError for a missing score or cost, a sample dropped before, or a sample without a column."""
        self.check_scores("ready", samples, scores)
        if costs is not None:
            self.check_scores("ready", samples, costs, "cost")
        elif self._with_costs:
            raise AlgorithmError(
                "control.ready got no costs, which this algorithm holds under a limit: write "
                "`control.ready(samples, scores, await fleet.cost.score(samples, group.row))`"
            )
        for row, score in zip(samples, scores, strict=True):
            if row.name in self._dropped.get(row.group, ()):
                raise AlgorithmError(
                    f"control.ready got sample {row.key}, which was handed to `control.drop`: call one of them"
                )
            if score.reward is not None:
                self._check_columns(row)
                if self._by_token and score.place is None:
                    raise AlgorithmError(
                        f"control.ready got for sample {row.key} a score without the rewards of its tokens, which a "
                        "reward function gives: change a score of `fleet.reward.score` with dataclasses.replace"
                    )

    def check_scores(self, function: str, samples: BatchRef, scores: Sequence[Score], service: str = "reward") -> None:
        """Raises AlgorithmError unless there is one finite score, or a score without a reward, for each sample."""
        each = scores if isinstance(scores, Sized) else [scores]
        plural = "costs" if service == "cost" else "scores"
        if wrong := next((type(score).__name__ for score in each if not isinstance(score, Score)), ""):
            raise AlgorithmError(
                f"control.{function}: {plural} are what `await fleet.{service}.score(samples, group.row)` answered, "
                f"not {wrong}s"
            )
        if len(samples) != len(each):
            raise AlgorithmError(f"control.{function} got {len(samples)} samples and {len(each)} {plural}")
        for row, score in zip(samples, each, strict=True):
            if score.reward is not None and not math.isfinite(score.reward):
                raise AlgorithmError(
                    f"control.{function} got the {service} {score.reward} for sample {row.key}: write None for a "
                    f"sample without a {service}"
                )

    def remember_drop(self, row: RowRef, running: Container[int]) -> None:
        """Remembers a sample that the algorithm dropped. running: groups that still roll out; others are forgotten."""
        if row.group not in self._dropped:
            self._dropped = {group: names for group, names in self._dropped.items() if group in running}
        self._dropped.setdefault(row.group, set()).add(row.name)

    def _check_columns(self, row: RowRef) -> None:
        for service in self._needed:
            column, write = COLUMNS[service]
            if not any(column in place.columns for place in row.places):
                raise AlgorithmError(
                    f"control.ready got sample {row.key} without what the {service} service says of it ({column}), "
                    f"which this algorithm trains with: write `{write}` before"
                )


class PauseSwitch:
    """Holds a run back by command: while it is on, no group is drawn and no step begins. Off at first.

    What runs already goes on: samples in flight are generated and scored, and wait; a running step ends. No version is
    published meanwhile, so nothing that waits gets older, and every bound holds as before. subscribers: called after
    each change; they must not block.
    """

    def __init__(self) -> None:
        self.on = False
        self.subscribers: list[Callable[[], None]] = []
        self._since = 0.0
        self._seconds = 0.0

    def turn(self, on: bool) -> bool:
        """Turns the switch on or off; returns whether that changed it."""
        if on == self.on:
            return False
        now = asyncio.get_running_loop().time()
        self._seconds += now - self._since if self.on else 0.0
        self._since = now
        self.on = on
        for subscriber in self.subscribers:
            subscriber()
        return True

    def take_seconds(self) -> float:
        """Returns for how many seconds the switch was on since it was asked before."""
        now = asyncio.get_running_loop().time()
        taken = self._seconds + (now - self._since if self.on else 0.0)
        self._seconds = 0.0
        self._since = now
        return taken


class Controller:
    """Runs an algorithm on a fleet; in an algorithm it is called `control`.

    gate, journal: new, or restored from a checkpoint. between: awaited with the version before the first draw and after
    each iteration: the place for a checkpoint. observe: takes every event. kill: takes a reader of weights that has to
    be killed. leave_out: takes a reader to which weights do not come, and why, "" once they do. prompt_name: names the
    prompt of a group in errors. checkpoint: folder of the one that was resumed. answered: names of rows there, of
    episodes that ran. shown: samples whose rows are read once more when trained. pauses: holds draws and steps back
    while it is on.
    """

    def __init__(
        self,
        gate: Gate,
        journal: Journal,
        fleet: Fleet,
        prompts: PromptSource,
        config: Config,
        advantages: Advantages,
        *,
        between: Callable[[int], Awaitable[None]],
        observe: Observe = lambda event: None,
        kill: Callable[[str], None] = lambda reader: None,
        leave_out: Callable[[str, str], None] = lambda reader, why: None,
        prompt_name: Callable[[int], str] = "group {}".format,
        checkpoint: str = "",
        answered: Sequence[SampleName] = (),
        shown: ShownRows | None = None,
        pauses: PauseSwitch | None = None,
    ) -> None:
        self._gate = gate
        self._fleet = fleet
        self._config = config
        self._between = between
        self._observe = observe
        self._prompt_name = prompt_name
        self._checkpoint = checkpoint
        self._answered = answered
        self._drawable = asyncio.Event()
        self._pickable = asyncio.Event()
        by_token = stores_token_rewards(config)
        self._releases = RowReleases(fleet, lambda: gate.oldest, self._drawable.set, shown, rewards_stored=by_token)
        release = self._releases.release
        self._tracker = SampleTracker(gate, journal, observe, release, self._state_changed, self._sample_ready)
        self._checks = AlgorithmChecks(fleet, by_token)
        self._rollouts = Rollouts(self._tracker, prompts, config, self._roll_out, fleet.fault_domains)
        self._publisher = WeightPublisher(fleet, config.staleness.publish_deadline, self._handed_over, kill, leave_out)
        self._iterations = Iterations(self._tracker, advantages, config, self._rows_lost)
        self._checked_fleet = replace(fleet, training=cast(Training, CheckedTraining(fleet.training, self._iterations)))
        self._pauses = pauses or PauseSwitch()
        self._stopping = False
        self._iterations_ended = False
        self._is_late = asyncio.Event()  # for the running iteration

    @property
    def version(self) -> int:
        return self._gate.version

    @property
    def staleness(self) -> StalenessReport:
        return self._iterations.staleness

    # ---- the run -----------------------------------------------------------------------------------------

    async def run(self, algorithm: Algorithm) -> None:
        """Runs from the first draw to the last step, and journals what is in flight at the end.

        Raises FleetFailed when the trainer was lost, TaskError when generation refused a prompt, and other errors from
        the algorithm, its iterations, the journal or an observer.
        """
        with one_error():
            async with asyncio.TaskGroup() as tasks:
                await self._run(algorithm, tasks)
        await self._tracker.close()

    async def _run(self, algorithm: Algorithm, tasks: asyncio.TaskGroup) -> None:
        self._algorithm = algorithm
        self._training_task: asyncio.Task[None] | None = asyncio.current_task()
        self._rollouts.tasks = tasks
        self._pauses.subscribers.append(self._state_changed)
        self._publisher.announce(await self._fleet.training.published())
        await restore_rows(self._fleet.generation, self._tracker, self._checkpoint, self._answered)
        beside = [
            tasks.create_task(self._publisher.run(), name="publish weights"),
            tasks.create_task(self._releases.run(), name="release rows"),
            tasks.create_task(self._iterations.prefetch(self._fleet.training), name="prefetch"),
            tasks.create_task(self._draw(), name="draw groups"),
        ]
        try:
            await self._train(tasks)
        finally:
            self._rollouts.stop()
        for task in beside:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_RELEASES):
                await self._releases.flush()

    def rows_to_save(self) -> BatchRef:
        return self._tracker.rows_to_save()

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        algorithm = self._algorithm
        try:
            async with asyncio.timeout(None) as limit:
                undoing = tasks.create_task(self._undo_when_late(limit), name="undo the running step")
                try:
                    with AttributedTo(algorithm, "train"):
                        await algorithm.train(self._checked_fleet, self)
                finally:
                    undoing.cancel()
        except TimeoutError:
            if not limit.expired():
                raise
            if self._iterations.cuts is not None:
                self._iterations.undone()
            return
        if algorithm.name and not self._iterations_ended:
            raise AlgorithmError(
                f"train of {algorithm.name} returned at version {self.version}, before `control.iterations()` had "
                "ended: write `async for iteration in control.iterations()` without leaving the loop"
            )

    async def _roll_out(self, group: Attempt) -> None:
        algorithm = self._algorithm
        try:
            with AttributedTo(algorithm, "roll_out"):
                await algorithm.roll_out(self._checked_fleet, self, group)
        except* TaskError as refused:
            raise TaskError(f"{self._prompt_name(group.prompts.id)}: {root_cause(refused)}") from None
        if algorithm.name and (missing := self._missing(group)):
            raise AlgorithmError(f"roll_out of {algorithm.name} returned although {missing}")

    def _missing(self, group: Attempt) -> str:
        """Describes what an attempt that returned has not handed in; empty: nothing, or it was overtaken."""
        number = group.prompts.id
        if self._gate.finished(number) or self._gate.group(number).attempt != group.prompts.attempt:
            return ""
        running, scoring = (self._gate.members(number, stage) for stage in OPEN)
        if running or scoring:
            function, members = ("generated", running) if running else ("ready", scoring)
            return f"samples {members} of group {number} were not handed to `control.{function}`"
        greedy = self._gate.awaits(number)
        return f"the greedy answer of group {number} was not handed to `control.compared`" if greedy else ""

    def describe_waits(self) -> list[str]:
        """Describes what the algorithm does and waits for, for the watchdog of the fleet."""
        counts = ", ".join(f"{self._gate.counts[stage]} {stage.value}" for stage in IN_FLIGHT)
        train = f"  train {wait_of(self._training_task)}"
        return [f"the algorithm, at version {self.version}: samples {counts}", *self._rollouts.describe_waits(), train]

    def stop(self) -> None:
        """Ends the run after the running iteration, as if the steps were done. The groups in flight are abandoned."""
        self._stopping = True
        self._state_changed()

    def stop_now(self) -> None:
        """Ends the run without the running iteration: its step is undone, and its samples wait for the next start; one
        that has begun to change the weights is finished. Call `stop` before."""
        self._is_late.set()

    async def _undo_when_late(self, limit: asyncio.Timeout) -> None:
        await self._is_late.wait()
        training = self._fleet.training
        for critic in filter(None, (self._fleet.critic, self._fleet.cost_critic)):
            await critic.undo_update()
        while (cuts := self._iterations.cuts) is not None:
            answers = await training.undo_step(cuts.incarnation, cuts.version)
            if UNDONE in answers:
                break
            if RUNNING not in answers:
                report = await training.step(cuts)  # The one that it has made.
                if self._iterations.cuts == cuts:
                    self.trained(report)
                break
            await asyncio.sleep(STEP_LOOK)
        limit.reschedule(asyncio.get_running_loop().time())

    async def _draw(self) -> None:
        await self._drawable.wait()
        for group in self._gate.groups():
            if self._rollouts.unfinished(group):
                self._rollouts.start(group)
        while True:
            self._rollouts.start_again()
            for drawn in itertools.count(1):
                if not self._may_draw():
                    break
                self._rollouts.start(self._tracker.draw())
                if drawn % DRAWN_AT_ONCE == 0:
                    await asyncio.sleep(0)
            self._releases.idle_because("blocked")
            self._drawable.clear()
            await self._drawable.wait()

    def _may_draw(self) -> bool:
        if self._pauses.on:
            return False
        gate = self._gate
        rows = gate.in_flight + gate.awaited + self._releases.unreleased  # Rows count until their release is answered.
        return self._tracker.may_draw() and rows + gate.config.rows <= gate.config.kept

    def _state_changed(self) -> None:
        self._drawable.set()
        self._sample_ready()

    def _sample_ready(self) -> None:
        """Wakes what waits for a full batch. Drawing sleeps on: a score, of which there are many, makes no room."""
        self._pickable.set()
        self._iterations.state_changed()

    # ---- the algorithm's side ----------------------------------------------------------------------------

    def generated(self, samples: BatchRef) -> None:
        """Takes samples of one group that are complete.

        Raises AlgorithmError for samples whose turns no environment answered, where there is one.
        """
        self._checks.check_generated(samples)
        self._tracker.generated(samples)

    def answered(self, samples: BatchRef) -> None:
        """Takes samples whose episodes go on, as the environment stored them: what a new attempt begins with."""
        self._tracker.answered(samples)

    def holds(self, samples: BatchRef) -> BatchRef:
        """Takes and returns samples of which another service made columns; these live as long as the tokens."""
        for row in samples:
            self._tracker.holds(row)
        return samples

    def ready(self, samples: BatchRef, scores: Sequence[Score], costs: Sequence[Score] | None = None) -> None:
        """Takes the scores of samples: each then waits for training, or is dropped without a reward or a cost.

        Raises AlgorithmError when a score, cost or column that training needs is missing, or a sample was dropped.
        """
        self._checks.check_ready(samples, scores, costs)
        if costs is None:
            for row, score in zip(samples, scores, strict=True):
                self._tracker.scored(row, score)
            return
        for row, score, cost in zip(samples, scores, costs, strict=True):
            self._tracker.scored(row, with_cost(score, cost), cost.reward)

    def compared(self, greedy: BatchRef, scores: Sequence[Score]) -> None:
        """Takes the score of a group's greedy answer, with which its samples are compared, and frees the answer."""
        self._checks.check_scores("compared", greedy, scores)
        for row, score in zip(greedy, scores, strict=True):
            self._tracker.compared(row, score)

    def drop(self, samples: BatchRef, reason: str) -> None:
        """Drops samples that were generated: counted under this reason, and in no baseline.

        Samples of an old attempt, and those that the gate has dropped already, stay as they are. Raises AlgorithmError
        without a reason, or when a sample was handed to `ready` before.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise AlgorithmError(
                f"control.drop got the reason {reason!r}: write a word that data/dropped/WORD shall count"
            )
        for row in samples:
            group = row.group
            if self._gate.finished(group) or row.attempt != self._gate.group(group).attempt:
                continue
            if row.member in self._gate.members(group, Stage.READY, Stage.TRAINING, Stage.TRAINED):
                raise AlgorithmError(
                    f"control.drop got sample {row.key}, which was handed to `control.ready`: call one of them"
                )
            if row.member in self._gate.members(group, *OPEN):
                self._checks.remember_drop(row, self._rollouts.running)
                self._tracker.drop(group, (row.member,), reason)
                self._observe(DroppedByAlgorithm(group, (row.member,), reason))

    async def iterations(self) -> AsyncIterator[Iteration]:
        """Yields one training iteration after the other, each when the gate has a batch for it."""
        await self._between(self.version)
        self._state_changed()
        while (picked := await self._next_batch()) is not None:
            yield self._iterations.begin(picked)
            if self._iterations.cuts is not None:
                raise AlgorithmError("call control.trained(report) in each iteration, `with iteration as cuts`")
            await self._between(self.version)
        self._iterations_ended = True

    def credit(self, cuts: Cuts, advantages: Sequence[float]) -> Cuts:
        """Returns the cuts of the running iteration with these advantages, one a row of `cuts.batch`, to train instead.

        The journal and the written samples have these advantages, too. Raises AlgorithmError for other cuts, without
        one finite advantage for each row, or when a critic gives each token its own advantage.
        """
        if self._fleet.critic is not None:
            raise AlgorithmError(
                "control.credit gives a sample one advantage, and here a critic gives each token its own from the "
                'sample\'s reward: write another algorithm.advantage than "gae", or hand another score to control.ready'
            )
        return self._iterations.credit(cuts, advantages)

    def trained(self, report: StepReport, *critics: ValueReport) -> None:
        """Takes the reports of trainer and critics on the running iteration, and announces the new weights.

        Raises AlgorithmError when no iteration runs, or this is no report.
        """
        if not isinstance(report, StepReport):
            raise AlgorithmError(
                f"control.trained got a {type(report).__name__}: hand it what `await fleet.training.step(cuts)` "
                "answered"
            )
        if self._iterations.cuts is None:
            raise AlgorithmError(
                "control.trained was called twice, or after its iteration had ended: call it once in each "
                "`with iteration as cuts`"
            )
        for critic in critics:
            report = replace(report, metrics={**report.metrics, **critic.metrics})
        self._iterations.done(report)
        if report.published is not None:
            self._publisher.announce(report.published)

    async def _next_batch(self) -> tuple[Cut, ...] | None:
        while not self._ends():
            self._pickable.clear()
            if self._pauses.on:
                await self._pickable.wait()
                continue
            picked = self._tracker.pick()
            self._drawable.set()  # Admission follows from what the trainer takes or lacks.
            if picked is not None:
                return picked
            if self._gate.exhausted:
                return None
            await self._pickable.wait()
        return None

    def _ends(self) -> bool:
        if self._stopping:
            return True
        if self.version < self._config.steps:
            return False
        self._gate.stop_drawing()
        self._releases.idle_because("starved")
        return self._config.finish == "abandon"

    # ---- workers come and go -----------------------------------------------------------------------------

    def worker_lost(
        self,
        instance: str,
        why: str,
        running: Iterable[int] = (),
        domain: FaultDomain = UNKNOWN_DOMAIN,
        alive: Collection[str] = (),
    ) -> None:
        """Restarts the groups that had rows at a worker that died. running: the groups that it worked for. domain:
        where it ran. alive: names of the workers that live there."""
        self._publisher.forget(instance)
        self._rollouts.worker_lost(instance, why, running, domain, alive)

    def worker_left(self, instance: str, why: str) -> None:
        """Restarts the groups that had rows at a worker whose host left, of which no group is to blame."""
        self._publisher.forget(instance)
        self._rollouts.worker_left(instance, why)

    def host_lost(self, instance: str) -> None:
        """Takes that a worker that died was lost with its host: no group is to blame."""
        self._rollouts.host_lost(instance)

    def _rows_lost(self, cuts: Cuts, error: LostRows) -> None:
        """Begins groups again whose rows the trainer could not read, at other workers where one cannot be reached."""
        for instance in self._publisher.unread(self._rollouts.living_owners(error), str(error)):
            self.begin_elsewhere(self._tracker.groups_at(instance), str(error))
        self._rollouts.rows_lost(cuts, error)

    def begin_elsewhere(self, groups: Iterable[int], why: str) -> None:
        """Has groups begin again at other workers than the one that lives, but cannot go on with them."""
        for group in groups:
            if not self._gate.finished(group):
                self._rollouts.lost(group, why)

    def worker_lives(self, service: str, instance: str) -> None:
        """Adds a worker that takes calls; a generator joins the readers of weights."""
        if service == "generation":
            self._publisher.join(instance)

    async def worker_started(self, service: str) -> None:
        """Hands the newest weights to a generator that started after the first ones."""
        if service == "generation":
            self._publisher.announce(await self._fleet.training.published())

    def _handed_over(self, event: Event) -> None:
        self._observe(event)
        if isinstance(event, WeightsHandedOver) and event.canary is not None:
            self._iterations.mismatch.add_canary(event.canary)
