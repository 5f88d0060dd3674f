"""A whole run in one process tree: from an order to a trained model in a run directory.

open or resume the directory ──> prompts, model ──> fleet ──> Controller.run(page) ──> last checkpoint, evaluation
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.algorithms.presets import advantages_of, page_of
from asyncrl.checkpoint import ResumePlan, commit, plan_resume, resume
from asyncrl.config import Config
from asyncrl.controller import Controller, Schedule
from asyncrl.deploy.local import LocalLauncher
from asyncrl.deploy.services import service_specs
from asyncrl.errors import FleetFailed, first
from asyncrl.evaluation import Evaluation, EvaluationSchedule, Evaluator, Question
from asyncrl.events import Event, GroupFinished, SampleScored, StepDone
from asyncrl.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.launch import RunFacts
from asyncrl.ledger import Journal
from asyncrl.models import prepare
from asyncrl.recording import Recorder, StepLine
from asyncrl.reward_failures import RewardFailures
from asyncrl.rolling import Sampling
from asyncrl.rundir import RunDirectory, open_run_directory
from asyncrl.settings.changes import check_resume
from asyncrl.settings.toml import dump
from asyncrl.staleness import Gate, GateConfig
from asyncrl.store import FileStore, run_lock
from asyncrl.tasks import Draw, held_out_prompts, training_prompts
from asyncrl.tasks.sources import Rows
from asyncrl.telemetry.display import Display
from asyncrl.telemetry.sinks import open_sinks
from asyncrl.telemetry.trace_merge import merge
from asyncrl.wire.auth import CurveKeys

STOP_PATIENCE = 6.0
"""Seconds that Ctrl-C leaves the running iteration, so that all of it, checkpoint included, ends within ten."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to run.

    command: what the user types to resume. prompts: given from Python instead of the config's source.
    reward_service: a service to use in place of the config's functions, served in this process.
    """

    config: Config
    run_dir: Path
    display: Display
    command: str
    accept_changes: bool = False
    prompts: Rows | None = None
    reward_service: ServiceSpec | None = None


@dataclass(frozen=True, slots=True)
class Questions:
    """training: by group id; held_out: empty without evaluation."""

    training: Draw
    held_out: Sequence[Question]


@dataclass(slots=True)
class TakenUp:
    """The state a run starts from. plan: None at the first start."""

    directory: RunDirectory
    store: FileStore
    journal: Journal
    gate: Gate
    plan: ResumePlan | None
    epoch: int = field(default=0)


async def run(order: Order) -> RunDirectory:
    """Train as ordered; the same order with the same directory goes on where it stopped.

    Raises:
        ConfigError, TaskError: the user's mistakes, before anything is started where it can be known.
        FleetFailed: the trainer died; the same order resumes.
    """
    directory = open_run_directory(order.run_dir)
    with run_lock(directory.path), closing(FileStore(directory.path)) as store:
        plan = plan_resume(store)
        _settle_config(order, directory, plan)
        questions = await asyncio.to_thread(_load_questions, order)
        model = await prepare(order.config, directory.model, order.display.say)
        taken_up = _take_up(order.config, directory, store, plan)
        facts = _facts(order.config, directory, model, taken_up)
        try:
            await _run_fleet(order, taken_up, questions, facts)
        except FleetFailed as failed:
            raise _resumable(failed, order.command) from failed
    if order.config.telemetry.trace:
        await asyncio.to_thread(merge, directory.path)
    return directory


def _resumable(failed: FleetFailed, command: str) -> FleetFailed:
    """The same error, with the command that resumes; the supervisor says it already, the controller does not know."""
    told = str(failed)
    return FleetFailed(told if command in told else f"{told}. Resume with: {command}", failed.exit_code)


# ---- before the fleet ------------------------------------------------------------------------------------


def _settle_config(order: Order, directory: RunDirectory, plan: ResumePlan | None) -> None:
    """Refuse a changed config, say what a resume takes over, and write down what is used."""
    if plan is not None:
        changes = check_resume(directory.path, order.config, order.accept_changes)
        for line in (*plan.said, *(f"changed: {change}" for change in changes)):
            order.display.say(line)
        order.display.say(
            f"resuming {directory.path} at version {plan.version} of {order.config.steps}: "
            f"model, optimizer and journal are taken over, {len(plan.groups)} groups in flight start again"
        )
    directory.config.write_text(dump(order.config))


def _load_questions(order: Order) -> Questions:
    config = order.config
    held_out = held_out_prompts(config)
    questions = held_out.first(config.evaluate.size) if held_out is not None else []
    return Questions(Draw(training_prompts(config, order.prompts), config.seed), questions)


def _take_up(config: Config, directory: RunDirectory, store: FileStore, plan: ResumePlan | None) -> TakenUp:
    gate_config = GateConfig.of(config)
    if plan is None:
        return TakenUp(directory, store, Journal(store), Gate(gate_config), None)
    journal = resume(store, plan)
    gate = Gate(gate_config, plan.version, plan.next_group)
    for group in plan.groups:
        gate.restore(group)
    return TakenUp(directory, store, journal, gate, plan, plan.epoch)


def _facts(config: Config, directory: RunDirectory, model: Path, taken_up: TakenUp) -> RunFacts:
    run_id, epoch = directory.run_id(), taken_up.epoch
    keys = CurveKeys.fresh() if config.fleet.wire == "tcp" else None
    return RunFacts(
        run=run_id,
        run_dir=str(directory.path),
        model_dir=str(model.absolute()),
        epoch=epoch,
        weights_arena=f"asyncrl-{run_id}-{epoch}-weights",
        config=config,
        checkpoint_dir=taken_up.plan.directory if taken_up.plan else None,
        curve=(keys.public, keys.secret) if keys else None,
    )


# ---- the fleet -------------------------------------------------------------------------------------------


async def _run_fleet(order: Order, taken_up: TakenUp, questions: Questions, facts: RunFacts) -> None:
    config = order.config
    specs = service_specs(config, evaluation=bool(questions.held_out), reward=order.reward_service)
    async with AsyncExitStack() as scope:
        launcher = None
        if config.fleet.wire != "inproc":
            launcher = scope.enter_context(LocalLauncher(config.fleet.wire, facts.run))
        order.display.say(f"starting {', '.join(spec.name for spec in specs)}")
        running = await scope.enter_async_context(
            running_fleet(specs, facts, launcher=launcher, report=order.display.say, resume=order.command)
        )
        await _Training(order, taken_up, questions, running).run()


class _Training:
    """One controller on one running fleet, with everything that looks on."""

    def __init__(self, order: Order, taken_up: TakenUp, questions: Questions, running: RunningFleet) -> None:
        self._order, self._config, self._taken_up = order, order.config, taken_up
        self._running, self._fleet = running, running.fleet
        self._news: asyncio.Queue[tuple[str, str, str]] = asyncio.Queue()
        self._last_commit = taken_up.plan.version if taken_up.plan else -1
        self._questions = questions
        # Twice what can be in flight: no member of a good group is among so many.
        patience = 2 * taken_up.gate.config.cap * taken_up.gate.config.members
        self._failures = RewardFailures(patience, order.display.say)
        self._evaluations: EvaluationSchedule | None = None
        if questions.held_out:
            assert self._fleet.evaluation is not None, "started for these questions"
            evaluator = Evaluator(self._fleet.evaluation, self._fleet.reward, questions.held_out, self._config)
            self._evaluations = EvaluationSchedule(self._fleet, evaluator, self._evaluated)

    async def run(self) -> None:
        config, taken_up = self._config, self._taken_up
        with self._open_recorder() as self._recorder:
            self._controller = Controller(
                taken_up.gate,
                taken_up.journal,
                self._fleet,
                self._questions.training,
                _sampling(config, taken_up.epoch),
                advantages_of(config),
                Schedule.of(config),
                between=self._between,
                observe=self._observe,
                evict=self._evict,
            )
            async with self._looking_on():
                await self._until_done()
                await self._finish()

    # ---- training ----------------------------------------------------------------------------------------

    async def _until_done(self) -> None:
        training = asyncio.create_task(self._controller.run(page_of(self._config)), name="controller")
        with _on_signal(lambda: self._stop(training)):
            await training

    def _stop(self, training: "asyncio.Task[None]") -> None:
        """Let the running iteration end, but not for ever; a second signal does not wait."""
        self._order.display.say("stopping after the running iteration; a checkpoint follows")
        self._controller.stop()
        asyncio.get_running_loop().call_later(STOP_PATIENCE, training.cancel)

    async def _between(self, version: int) -> None:
        every = self._config.training.checkpoint_every
        if self._last_commit < 0 or (every and version - self._last_commit >= every):
            await self._commit(version)

    async def _commit(self, version: int) -> None:
        async def write(directory: str) -> Any:
            return await self._fleet.training.checkpoint(directory, self._taken_up.epoch, version)

        await commit(self._taken_up.journal, write, self._config.training.keep_checkpoints)
        self._last_commit = version

    async def _finish(self) -> None:
        if self._controller.version > self._last_commit:
            await self._commit(self._controller.version)
        if self._evaluations is not None:
            await self._evaluations.finish(await self._fleet.training.published())
        await self._recorder.drain()
        if advice := self._controller.staleness.advice():
            self._order.display.say(advice)

    # ---- looking on --------------------------------------------------------------------------------------

    @contextmanager
    def _open_recorder(self) -> Iterator[Recorder]:
        order, directory = self._order, self._taken_up.directory
        names, say = self._config.telemetry.sinks, order.display.say
        sinks = open_sinks(names, directory.path, self._config.name, self._config.model_dump(mode="json"), say)

        def send(step: int, numbers: Mapping[str, float]) -> None:
            for sink in sinks:
                sink.write(step, numbers)

        def show(line: StepLine) -> None:
            order.display.step(line.metrics, line.samples[0] if line.samples else None)

        per_step = self._config.telemetry.samples_per_step
        recorder = Recorder(directory, self._fleet, per_step, self._taken_up.epoch, show, send)
        try:
            yield recorder
        finally:
            recorder.close()
            for sink in sinks:
                sink.close()

    @asynccontextmanager
    async def _looking_on(self) -> AsyncIterator[None]:
        """Recorder, evaluation and news of workers, beside the controller."""
        self._running.on_lives.append(lambda service, instance: self._news.put_nowait(("lives", service, instance)))
        self._running.on_lost.append(self._lost)
        self._running.on_gone.append(lambda service, instance: self._news.put_nowait(("gone", service, instance)))
        beside = {"recorder": self._recorder.run(), "news of workers": self._follow_news()}
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
            raise first(errors) from None

    def _observe(self, event: Event) -> None:
        self._recorder.observe(event)
        match event:
            case SampleScored(score=score):
                self._failures.observe(score)
            case GroupFinished():
                self._running.progressed()
            case StepDone(report=report) if report.published and self._evaluations is not None:
                if report.version % self._config.evaluate.every == 0 and report.version < self._config.steps:
                    self._evaluations.ask(report.published)
            case _:
                pass

    def _evaluated(self, evaluation: Evaluation) -> None:
        self._recorder.evaluated(evaluation)
        self._order.display.say(
            f"held out, version {evaluation.version}: reward {evaluation.mean:.3f} ± {evaluation.stderr:.3f} "
            f"over {evaluation.prompts} prompts"
        )

    # ---- workers come and go -----------------------------------------------------------------------------

    def _lost(self, service: str, instance: str, why: str) -> None:
        if service != "training":
            self._order.display.say(f"lost {instance}: {why}; it is started again")
        self._controller.worker_lost(instance, why)

    async def _follow_news(self) -> None:
        """What has to be awaited. Only a process that was waited for surely reads no weights any more."""
        while True:
            kind, service, instance = await self._news.get()
            if kind == "lives":
                await self._controller.worker_started(service)
            elif service == "generation":
                await self._fleet.training.detached(instance)

    def _evict(self, reader: str) -> None:
        self._order.display.say(f"{reader} did not take over new weights in time; it is killed and started again")
        self._running.kill(reader)


def _sampling(config: Config, epoch: int) -> Sampling:
    generation = config.generation
    return Sampling(generation.temperature, generation.max_new_tokens, generation.deadline, config.seed, epoch)


@contextmanager
def _on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call `stop` while inside; only the main thread can hear them."""
    loop, heard = asyncio.get_running_loop(), []
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop)
            heard.append(number)
        except (ValueError, RuntimeError):
            continue
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)
