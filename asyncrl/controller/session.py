"""A session: one controller on one running fleet, with everything that observes it.

Controller.run ──> events ──> Recorder, alarms, evaluation schedule, progress of the fleet
     └── between iterations: checkpoints
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from asyncrl.config.schema import Config
from asyncrl.controller.alarms.algorithm_drops import AlgorithmDrops
from asyncrl.controller.alarms.poisoned_groups import PoisonedGroups
from asyncrl.controller.alarms.reward_failures import RewardFailures
from asyncrl.controller.algorithm import Algorithm
from asyncrl.controller.controller import Controller, Schedule
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.checkpoints import ResumePlan, commit
from asyncrl.controller.journal.journal_store import FileStore
from asyncrl.controller.journal.ledger import Journal
from asyncrl.controller.observers.evaluation import (
    Evaluation,
    EvaluationSchedule,
    EvaluationTimeouts,
    Evaluator,
    Question,
)
from asyncrl.controller.observers.events import Event, GroupFinished, PoliciesApart, PrefetchFailed, StepDone
from asyncrl.controller.observers.recorder import Recorder, StepLine
from asyncrl.controller.rollouts import Sampling
from asyncrl.controller.worker_events import WorkerEvents
from asyncrl.errors import DeadlineExceeded, FleetFailed, root_cause
from asyncrl.fleet.fleet import RunningFleet
from asyncrl.objectives.advantages import Advantages
from asyncrl.protocols.messages import Checkpointed
from asyncrl.tasks import Draw
from asyncrl.tasks.prompt_draw import drawn_row
from asyncrl.telemetry.display import Display
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.sinks import open_sinks

STOP_TIMEOUT = 6.0
"""Seconds that Ctrl-C leaves the running iteration, so that all of it, checkpoint included, ends within ten."""


@dataclass(frozen=True, slots=True)
class Questions:
    """The prompts of a run. training: by group id; held_out: empty without evaluation; source: names the training rows
    in messages; rows: how many there are."""

    training: Draw
    held_out: Sequence[Question]
    source: str
    rows: int

    def where(self, group: int, seed: int) -> str:
        """Names the row of a group in messages."""
        return f"{self.source}, row {drawn_row(seed, group, self.rows)}"


@dataclass(slots=True)
class RunState:
    """The state that a run starts from. plan: None at the first start."""

    directory: RunDirectory
    store: FileStore
    journal: Journal
    gate: Gate
    plan: ResumePlan | None
    incarnation: int = 0


class InterruptScope(Protocol):
    """The part of interrupt handling that a session needs."""

    def ending_in_order(self, end: Callable[[], None]) -> AbstractContextManager[None]:
        """Inside this scope the first interrupt calls `end`, and does not abandon the run."""
        ...

    def abandon(self, why: str) -> None:
        """Cancels the run."""
        ...


class Session:
    """Runs one controller on one running fleet, with recorder, alarms, evaluation and checkpoints.

    Args:
        config: of the run. state: where the run starts. questions: its prompts.
        algorithm, advantages: what trains. running: the fleet. display: shows texts and steps to the user.
        interrupts: end the run in order.
    """

    def __init__(
        self,
        config: Config,
        state: RunState,
        questions: Questions,
        algorithm: Algorithm,
        advantages: Advantages,
        running: RunningFleet,
        display: Display,
        interrupts: InterruptScope,
    ) -> None:
        self._config = config
        self._state = state
        self._questions = questions
        self._algorithm = algorithm
        self._advantages = advantages
        self._running = running
        self._fleet = running.fleet
        self._display = display
        self._interrupts = interrupts
        self._stopping = False
        self._abandon_timer: asyncio.TimerHandle | None = None
        self._last_commit = state.plan.version if state.plan else -1
        gate = state.gate
        # Twice what can be in flight: a row of failures that long contains all members of any good group.
        limit = 2 * gate.config.cap * gate.config.members
        self._alarms = (
            RewardFailures(limit, display.say),
            AlgorithmDrops(limit, gate.config.baseline, gate.version),
            PoisonedGroups(display.say),
        )
        self._evaluations = self._evaluation_schedule()
        self._recorder: Recorder
        self._controller: Controller

    def _evaluation_schedule(self) -> EvaluationSchedule | None:
        fleet, config = self._fleet, self._config
        if not self._questions.held_out:
            return None
        assert fleet.evaluation is not None, "a run with held-out prompts has this service"
        evaluator = Evaluator(fleet.evaluation, fleet.reward, self._questions.held_out, config, fleet.cost)
        timeouts = EvaluationTimeouts.of(config)
        return EvaluationSchedule(fleet, evaluator, timeouts, self._evaluated, self._not_evaluated)

    async def run(self) -> None:
        """Runs the controller to its end; makes the last checkpoint and the last evaluation.

        Raises:
            FleetFailed: the trainer or a critic was lost, or did not answer in time.
            AsyncrlError: as `Controller.run`, and what the alarms raise.
        """
        with self._open_recorder() as self._recorder:
            self._controller = self._make_controller()
            self._running.describe_algorithm = self._controller.describe_waits
            try:
                async with self._observers():
                    with self._interrupts.ending_in_order(self._stop):
                        await self._train()
                        await self._finish()
            except DeadlineExceeded as late:  # Other workers are killed or called again, so the trainer or a critic is.
                raise FleetFailed(str(late)) from late

    def _make_controller(self) -> Controller:
        config, state, generation = self._config, self._state, self._config.generation
        return Controller(
            state.gate,
            state.journal,
            self._fleet,
            self._questions.training,
            Sampling(
                generation.temperature,
                generation.max_new_tokens,
                generation.deadline,
                config.seed,
                state.incarnation,
            ),
            self._advantages,
            Schedule.of(config),
            between=self._between,
            observe=self._observe,
            kill=self._kill_reader,
            prompt_name=lambda group: self._questions.where(group, config.seed),
        )

    # ---- training ----------------------------------------------------------------------------------------

    async def _train(self) -> None:
        try:
            await self._controller.run(self._algorithm)
        finally:
            if self._abandon_timer is not None:
                self._abandon_timer.cancel()

    def _stop(self) -> None:
        """Lets the running iteration end, within STOP_TIMEOUT."""
        self._display.say(
            f"ending with a checkpoint, after the running iteration (at most {STOP_TIMEOUT:.0f} s); "
            "Ctrl-C once more abandons the wait"
        )
        self._stopping = True
        self._controller.stop()
        why = f"the running iteration did not end within {STOP_TIMEOUT:.0f} s of Ctrl-C"
        self._abandon_timer = asyncio.get_running_loop().call_later(STOP_TIMEOUT, self._interrupts.abandon, why)

    async def _between(self, version: int) -> None:
        every = self._config.training.checkpoint_every
        if self._last_commit < 0 or (every and version - self._last_commit >= every):
            await self._commit(version)

    async def _commit(self, version: int) -> None:
        async def write(directory: str) -> Checkpointed:
            made = await self._fleet.training.checkpoint(directory, self._state.incarnation, version)
            for critic in filter(None, (self._fleet.critic, self._fleet.cost_critic)):
                learnt = await critic.checkpoint(directory, self._state.incarnation, version)
                made = replace(made, files={**made.files, **learnt.files})
            return made

        await commit(self._state.journal, write, self._config.training.keep_checkpoints)
        self._last_commit = version

    async def _finish(self) -> None:
        if self._controller.version > self._last_commit:
            await self._commit(self._controller.version)
        if self._evaluations is not None and not self._stopping:
            await self._evaluations.finish(await self._fleet.training.published())
        await self._recorder.drain()
        staleness = self._controller.staleness
        for text in (staleness.lengths.report(self._state.gate.samples()), staleness.advice()):
            if text:
                self._display.say(text)

    # ---- observers ---------------------------------------------------------------------------------------

    @contextmanager
    def _open_recorder(self) -> Iterator[Recorder]:
        config, directory, display = self._config, self._state.directory, self._display
        settings = config.model_dump(mode="json")
        sinks = open_sinks(config.telemetry.sinks, directory.path, config.name, settings, display.say)

        def send(step: int, metrics: Mapping[str, float]) -> None:
            for sink in sinks:
                sink.write(step, metrics)

        def show(line: StepLine) -> None:
            display.step(line.metrics, line.samples[0] if line.samples else None)

        per_step = config.telemetry.samples_per_step
        recorder = Recorder(
            directory, self._fleet, self._running.health_poller.poll, per_step, self._state.incarnation, show, send
        )
        try:
            yield recorder
        finally:
            recorder.close()
            for sink in sinks:
                sink.close()

    @asynccontextmanager
    async def _observers(self) -> AsyncIterator[None]:
        """Runs recorder, evaluation and worker events beside the controller."""
        beside = {
            "recorder": self._recorder.run(),
            "worker events": WorkerEvents(self._running, self._controller).follow(),
        }
        if self._evaluations is not None:
            self._evaluations.ask(await self._fleet.training.published())
            beside["evaluation"] = self._evaluations.run()
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(work, name=name) for name, work in beside.items()]
                yield
                for task in running:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise (error := root_cause(errors)) from error.__cause__

    def _observe(self, event: Event) -> None:
        self._recorder.observe(event)
        for alarm in self._alarms:
            alarm.observe(event)
        match event:
            case PoliciesApart(warning):
                self._display.say(warning)
            case PrefetchFailed(reason):
                self._display.say(f"the trainer could not prefetch rows, and reads them in its steps now: {reason}")
            case GroupFinished(poison=False):
                self._running.supervisor.progressed()
            case StepDone(report=report) if report.published and self._evaluations is not None:
                if report.version % self._config.evaluate.every == 0 and report.version < self._config.steps:
                    self._evaluations.ask(report.published)
            case _:
                pass

    def _not_evaluated(self, version: int, why: str) -> None:
        self._display.say(f"version {version} is not evaluated: {why}")

    def _evaluated(self, evaluation: Evaluation) -> None:
        self._recorder.evaluated(evaluation)
        cost = "" if evaluation.cost is None else f", cost {evaluation.cost:.3f}"
        self._display.say(
            f"held out, version {evaluation.version}: reward {evaluation.mean:.3f} ± {evaluation.stderr:.3f}{cost} "
            f"over {evaluation.prompts} prompts"
        )

    def _kill_reader(self, reader: str) -> None:
        self._display.say(f"{reader} did not take over new weights in time; it is killed and started again")
        self._running.supervisor.kill(reader)
