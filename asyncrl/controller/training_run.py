"""A training run: one controller on one running fleet, with everything that observes it.

Controller.run ──> events ──> Recorder, alarms, evaluation schedule, progress of the fleet
     └── between iterations: checkpoints
workers ──> WorkerEvents ──> Controller
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from asyncrl.concurrency import running_beside
from asyncrl.controller.checkpointing import BackgroundCommits, read_terms, save_rows_and_terms
from asyncrl.controller.controller import Algorithm, Controller, PauseSwitch
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import Stage
from asyncrl.controller.journal.checkpoints import NOTHING_SAVED, BestCheckpoint, ResumePlan, SavedSamples, versions
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.observers.alarms import Alarm, AlgorithmDrops, PoisonedGroups, RewardFailures
from asyncrl.controller.observers.evaluation import Evaluation, EvaluationSchedule, Question, schedule_of
from asyncrl.controller.observers.events import Event, GroupFinished, StepDone, Warned
from asyncrl.controller.observers.progress import RewardOutput, RunProgress, StatusWriter
from asyncrl.controller.observers.recorder import Recorder, ShownRows
from asyncrl.controller.observers.training_guards import TrainingGuards
from asyncrl.errors import DeadlineExceeded, FleetFailed
from asyncrl.fleet.fleet import RunningFleet
from asyncrl.fleet.lifecycle_events import FleetEvent, WorkerCleanedUp, WorkerLost, WorkerStarted
from asyncrl.fleet.worker.process_memory import FrozenObjects
from asyncrl.objectives.advantages import Advantages
from asyncrl.protocols.messages import Checkpointed
from asyncrl.tasks import Draw
from asyncrl.telemetry.display import Display
from asyncrl.telemetry.logs import WarningFile
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.run_status import RunStatus
from asyncrl.telemetry.samples_file import SampleRecord
from asyncrl.telemetry.sinks import open_sinks

if TYPE_CHECKING:
    from asyncrl.telemetry.prometheus import PrometheusExporter

OnStep: TypeAlias = Callable[[dict[str, float]], object]
STEP_SHARE = 1 / 3
"""Share of `fleet.grace` that the running step has to end by itself; the rest is for the last checkpoint."""
COMMIT_LOOK = 1.0
"""Seconds between two looks whether a checkpoint is still being written, when the grace is over."""


@dataclass(frozen=True, slots=True)
class Questions:
    """The prompts of a run. training: by group id; held_out: by set."""

    training: Draw
    held_out: Mapping[str, Sequence[Question]]

    def where(self, group: int) -> str:
        return f"task.prompts: {self.training.where(group)}"


@dataclass(slots=True)
class RunState:
    """The state that a run starts from. plan: None at the first start. restored: what a resume goes on with.
    pauses: holds the run back by command. on_commit: takes the version of each checkpoint."""

    directory: RunDirectory
    journal: Journal
    gate: Gate
    plan: ResumePlan | None
    restored: SavedSamples = NOTHING_SAVED
    pauses: PauseSwitch = field(default_factory=PauseSwitch)
    on_commit: Callable[[int], Awaitable[None]] | None = None

    @property
    def incarnation(self) -> int:
        return self.journal.ledger.incarnation


@dataclass
class WorkerEvents:
    """Notifies the controller at once that a worker started or is lost; `follow` does what has to be awaited, in order.

    The queue is bounded by the deaths of workers, each of which is followed by a pause.
    """

    running: RunningFleet
    controller: Controller

    def __post_init__(self) -> None:
        self._queue: asyncio.Queue[WorkerStarted | WorkerLost | WorkerCleanedUp] = asyncio.Queue()
        for service, workers in self.running.workers.items():
            for worker in workers:
                if worker.alive:
                    self.controller.worker_lives(service, worker.instance)
        self.running.subscribers.append(self._take)

    def _take(self, event: FleetEvent) -> None:
        if isinstance(event, WorkerLost) and self.running.facts.heartbeat is not None:
            self._queue.put_nowait(event)
        if isinstance(event, WorkerCleanedUp) and event.host_is_gone:
            self.controller.host_lost(event.instance)
        match event:
            case WorkerStarted(service, instance):
                self.controller.worker_lives(service, instance)
                self._queue.put_nowait(event)
            case WorkerLost(_, instance, reason, has_left=True):
                self.controller.worker_left(instance, reason)
            case WorkerLost(service, instance, reason):
                groups = self.running.workers[service].groups_at(instance)
                domain = self.running.fault_domain_of(instance)
                self.controller.worker_lost(instance, reason, groups, domain, self.running.alive_in(domain))
            case WorkerCleanedUp("generation"):
                self._queue.put_nowait(event)

    async def follow(self) -> None:
        """Runs until cancelled. A generation worker reads no weights any more only once its process was waited for.
        Trainer and critics learn of lost workers on other hosts, whose rows they would wait for."""
        while True:
            match await self._queue.get():
                case WorkerStarted(service):
                    await self.controller.worker_started(service)
                case WorkerCleanedUp(_, instance):
                    await self.running.fleet.training.detached(instance)
                case WorkerLost(_, instance):
                    fleet = self.running.fleet
                    for readers in (fleet.training, fleet.critic, fleet.cost_critic):
                        if readers is not None:
                            await readers.owner_lost(instance)


@dataclass
class TrainingRun:
    """Runs one controller on one running fleet, with recorder, alarms, evaluation and checkpoints.

    ending_in_order: returns a scope in which the first interrupt calls its argument, and does not abandon the run.
    abandon: cancels the run, and says why. progress: shows what the run does while no step ends. frozen: takes what is
    in flight after each step. on_step: takes the metrics of each step, and returns whether the run shall end.
    """

    state: RunState
    questions: Questions
    algorithm: Algorithm
    advantages: Advantages
    running: RunningFleet
    display: Display
    ending_in_order: Callable[[Callable[[], None]], AbstractContextManager[None]]
    abandon: Callable[[str], None]
    progress: RunProgress
    frozen: FrozenObjects
    on_step: OnStep | None = None

    def __post_init__(self) -> None:
        self.config = self.running.facts.config
        self._fleet = self.running.fleet
        self._stopping = False
        self._ended_early = False
        self._timers: list[asyncio.TimerHandle] = []
        self._last_commit = self.state.plan.version if self.state.plan else -1
        gate = self.state.gate
        # Twice what can be in flight: a row of failures that long contains all members of any good group.
        limit = 2 * gate.config.cap * gate.config.members
        self._warn = WarningFile(self.state.directory.warnings, self.display.say, lambda: gate.version).warn
        alarm = Alarm(self.config.guards, self._warn)
        self._guards = TrainingGuards.of(self.config, limit, alarm)
        self._alarms = (
            RewardFailures(limit, alarm, gate.config.members, where=self.questions.where),
            AlgorithmDrops(limit, gate.config.baseline, gate.version, alarm),
            PoisonedGroups(alarm),
            self._guards,
            RewardOutput(self.state.directory, self.display.say),
            self.progress,
        )
        self.progress.in_flight = lambda: gate.in_flight
        self._evaluations = self._evaluation_schedule()
        self._best = self._best_checkpoint()
        self._commits = BackgroundCommits(self.state.journal, self.config.training, self._best.kept, self._committed)
        self._shown = ShownRows()
        self._exporter: PrometheusExporter | None = None
        self._recorder = self._open_recorder()
        self._controller = self._make_controller()

    def _evaluation_schedule(self) -> EvaluationSchedule | None:
        questions = self.questions.held_out
        answers = self.state.directory.answers
        return schedule_of(self._fleet, self.config, questions, answers, self._evaluated, self._not_evaluated)

    def _best_checkpoint(self) -> BestCheckpoint:
        schedule = self._evaluations
        pending = tuple if schedule is None else lambda: schedule.pending
        best = BestCheckpoint(self.state.directory.best, self.config.training.keep_best, pending)
        best.restore(self._last_commit)
        return best

    async def run(self) -> None:
        """Runs the controller to its end; makes the last checkpoint and the last evaluation.

        Raises what `Controller.run` and the alarms raise, and FleetFailed when the trainer or a critic is too late.
        """
        with closing(self._recorder):
            self.running.describe_algorithm = self._controller.describe_waits
            if self.state.plan:
                self._recorder.restore_terms(await asyncio.to_thread(read_terms, self.state.plan.directory))
            try:
                async with self._recorder.recording(), self._observers(), self._commits:
                    with self.ending_in_order(self._stop):
                        await self._train()
                        await self._finish()
            except DeadlineExceeded as late:  # Other workers are killed or called again, so the trainer or a critic is.
                raise FleetFailed(str(late)) from late

    def _make_controller(self) -> Controller:
        return Controller(
            self.state.gate,
            self.state.journal,
            self._fleet,
            self.questions.training,
            self.config,
            self.advantages,
            between=self._between,
            observe=self._observe,
            kill=self._kill_reader,
            leave_out=self._leave_out,
            prompt_name=self.questions.where,
            checkpoint=self.state.plan.directory if self.state.plan else "",
            answered=self.state.restored.answered,
            shown=self._shown,
            pauses=self.state.pauses,
        )

    async def _train(self) -> None:
        self.state.pauses.subscribers.append(self._show_pause)
        self._show_pause()
        try:
            await self._controller.run(self.algorithm)
        finally:
            self.state.pauses.subscribers.remove(self._show_pause)
            for timer in self._timers:
                timer.cancel()

    def _show_pause(self) -> None:
        self.progress.begin("paused by command: no group is drawn, and no step begins" if self.state.pauses.on else "")

    def _stop(self) -> None:
        """Lets the running step end within its share of the grace, and has it undone then."""
        if self._stopping:
            return
        grace = self.config.fleet.grace
        self.display.say(
            f"ending with a checkpoint, after the running step; one that takes over {grace * STEP_SHARE:.0f} s is "
            "undone; Ctrl-C once more abandons the wait"
        )
        self._stopping = True
        self._controller.stop()
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(grace * STEP_SHARE, self._stop_now), loop.call_later(grace, self._give_up)]

    def _stop_now(self) -> None:
        self.display.say("the running step is undone: its samples wait for the next start")
        self._controller.stop_now()

    def _give_up(self) -> None:
        """Abandons the run, which has begun no last checkpoint, once none is being written: that one may be the newest
        version."""
        if self._commits.is_running:
            self._timers.append(asyncio.get_running_loop().call_later(COMMIT_LOOK, self._give_up))
        else:
            grace = self.config.fleet.grace
            self.abandon(
                f"the running step was neither ended nor undone within {grace:g} s (fleet.grace) of the signal"
            )

    async def _between(self, version: int) -> None:
        self._commits.check()
        self.frozen.add_survivors()
        every = self.config.training.checkpoint_every
        is_evaluated = self._best.is_evaluated and version in self._best.kept(()) and version > self._last_commit
        if self._last_commit < 0 or (every and version - self._last_commit >= every) or is_evaluated:
            await self._commit(version)

    async def _commit(self, version: int) -> None:
        fleet = self._fleet
        position = (self.state.incarnation, version)
        samples = self._controller.rows_to_save()  # By the records up to here, which a resume begins after.
        trainers = [each for each in (fleet.training, fleet.critic, fleet.cost_critic) if each is not None]

        async def copy(directory: str) -> Checkpointed:  # Before running episodes go on.
            saved = await save_rows_and_terms(fleet.training, samples, directory, self._recorder.terms_of)
            for trainer in trainers:
                await trainer.copy_state(*position)
            return saved

        async def write(directory: str) -> Checkpointed:
            await self._recorder.drain()  # A resume repeats later steps only.
            return Checkpointed.merge([await trainer.checkpoint(directory, *position) for trainer in trainers])

        await self._commits.begin(version, copy, write)
        self._last_commit = version  # Where `begin` was cancelled, the end of the run commits.

    async def _committed(self, version: int) -> None:
        self._best.write(versions(self.state.journal.store))
        if self.state.on_commit is not None:
            await self.state.on_commit(version)

    async def _finish(self) -> None:
        if self._controller.version > self._last_commit:
            self.progress.begin("writing the last checkpoint")
            await self._commit(self._controller.version)
        await self._commits.finish()
        if self._evaluations is not None and not self._stopping:
            self.progress.begin("evaluating the last version")
            await self._evaluations.finish(await self._fleet.training.published())
        await self._recorder.drain()
        staleness = self._controller.staleness
        gate = self.state.gate
        drops = self.progress.drops(gate.counts[Stage.TRAINED], gate.in_flight)
        for text in (drops, staleness.length_bias(gate.samples()), staleness.advice()):
            if text:
                self.display.say(text)

    def _open_recorder(self) -> Recorder:
        config = self.config
        directory = self.state.directory
        settings = self.config.model_dump(mode="json")
        return Recorder(
            directory,
            self._fleet,
            self.running.health_poller.poll,
            self.state.incarnation,
            self._show,
            open_sinks(config.telemetry.sinks, directory.path, config.name, settings, self.display.say),
            self._shown,
            self.state.pauses.take_seconds,
            round(config.telemetry.samples_gb * 10**9),
            self._warn,
            config.algorithm.turn_discount,
        )

    def _status_writer(self) -> StatusWriter:
        state = self.state
        return StatusWriter(
            state.directory.status,
            state.gate,
            state.journal,
            self.running.health_poller,
            self.config.steps,
            self._publish,
            is_paused=lambda: state.pauses.on,
        )

    def _publish(self, status: RunStatus) -> None:
        if self._exporter is not None:
            self._exporter.take_status(status)

    def _show(self, metrics: Mapping[str, float], sample: SampleRecord | None) -> None:
        self.display.step(metrics, sample)
        if "completions/equal_groups" in metrics:
            self._guards.take_equal_texts(metrics["completions/equal_groups"])
        if not (self._best.is_evaluated or any(name.startswith("skipped/") for name in metrics)):
            self._best.note(int(metrics["version"]), metrics)
        if self.on_step is not None and self.on_step(dict(metrics)) and not self._ended_early:
            self._ended_early = True
            self.display.say(f"the run ends after step {metrics['step']:.0f}, as on_step (or the flag stop-at) asked")
            self._controller.stop()
        if self._exporter is not None:
            self._exporter.take_step(metrics)

    def _open_exporter(self) -> "PrometheusExporter":
        from asyncrl.telemetry.prometheus import PrometheusExporter

        telemetry = self.config.telemetry
        exporter = PrometheusExporter(telemetry.prometheus, telemetry.prometheus_token)
        host = telemetry.prometheus.rpartition(":")[0]
        self.display.say(f"metrics for Prometheus: http://{host}:{exporter.port}/metrics")
        return exporter

    @asynccontextmanager
    async def _observers(self) -> AsyncIterator[None]:
        beside = {
            "worker events": WorkerEvents(self.running, self._controller).follow(),
            "state of the run": self._status_writer().run(),
        }
        if self.config.telemetry.prometheus:
            self._exporter = self._open_exporter()
            beside["metrics endpoint"] = self._exporter.run()
        if self._evaluations is not None:
            self._evaluations.ask(await self._fleet.training.published())
            beside["evaluation"] = self._evaluations.run()
        async with running_beside(beside):
            yield

    def _observe(self, event: Event) -> None:
        self._recorder.observe(event)
        for alarm in self._alarms:
            alarm.observe(event)
        match event:
            case Warned(text):
                self._warn(text)
            case GroupFinished(poison=False):
                self.running.supervisor.progressed()
            case StepDone(report=report) if report.published and self._evaluations is not None:
                due = self.config.evaluate.due(report.version)
                if due and report.version < self.config.steps:
                    self._evaluations.ask(report.published, due)

    def _not_evaluated(self, version: int, why: str) -> None:
        self.display.say(f"version {version} is not evaluated: {why}")

    def _evaluated(self, evaluation: Evaluation) -> None:
        self._recorder.evaluated(evaluation)
        if self._best.is_evaluated:
            self._best.note(evaluation.version, evaluation.metrics())
            self._best.write(versions(self.state.journal.store))
        if self.config.telemetry.print_every:
            self.display.say(str(evaluation))

    def _kill_reader(self, reader: str) -> None:
        self.display.say(f"{reader} did not take over new weights in time; it is killed and started again")
        self.running.supervisor.kill(reader)

    def _leave_out(self, reader: str, why: str) -> None:
        """Keeps samples from a generator to which the weights do not come; those that it has begin again elsewhere."""
        generators = self.running.workers["generation"]
        generators.leave_out(reader, out=bool(why))
        if why:
            self._controller.begin_elsewhere(generators.groups_at(reader), why)
