"""A whole run in one process tree: from an order to a trained model in a run directory.

open or resume the directory ──> prompts, model ──> fleet ──> Controller.run(page) ──> last checkpoint, evaluation
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.algorithms.choice import advantages_of, page_mistakes, page_of
from asyncrl.checkpoint import commit, plan_resume, versions
from asyncrl.config import Config
from asyncrl.context import refuse_without_context
from asyncrl.controller import Controller, Page, Schedule
from asyncrl.deploy.beginning import (
    LONGEST,
    PRETRAIN,
    Order,
    Questions,
    TakenUp,
    facts_of,
    load_questions,
    nothing_left,
    settle_config,
    take_up,
)
from asyncrl.deploy.exhaustion import allow_descriptors, exhausted
from asyncrl.deploy.footprint import refuse_what_does_not_fit
from asyncrl.deploy.interrupts import Interrupts
from asyncrl.deploy.local import LocalLauncher
from asyncrl.deploy.services import service_specs
from asyncrl.errors import (
    ConfigError,
    DeadlineExceeded,
    FleetFailed,
    Interrupted,
    PageError,
    RemoteError,
    RewardError,
    TaskError,
    first,
)
from asyncrl.evaluation import Evaluation, EvaluationSchedule, Evaluator, Patience
from asyncrl.events import Event, GroupFinished, GroupPoisoned, PoliciesApart, SampleScored, StepDone
from asyncrl.fleet import Fleet, RunningFleet, running_fleet
from asyncrl.launch import RunFacts
from asyncrl.long_lived import long_lived
from asyncrl.models import is_complete, judges_folders, prepare
from asyncrl.news import News
from asyncrl.page_drops import PageDrops
from asyncrl.parts import missing_parts
from asyncrl.poisoned import Poisoned
from asyncrl.recording import Recorder, StepLine
from asyncrl.reward_failures import RewardFailures
from asyncrl.rewards.functions import check_functions
from asyncrl.rolling import Attempt, Sampling
from asyncrl.rundir import Before, RunDirectory, open_run_directory
from asyncrl.store import FileStore, run_lock
from asyncrl.telemetry.sinks import check_sinks, open_sinks
from asyncrl.telemetry.trace_merge import merge

STOP_PATIENCE = 6.0
"""Seconds that Ctrl-C leaves the running iteration, so that all of it, checkpoint included, ends within ten."""


async def run(order: Order) -> RunDirectory:
    """Train as ordered; the same order with the same directory goes on where it stopped.

    Raises:
        ConfigError, TaskError: the user's mistakes, before anything is started where it can be known.
        FleetFailed: the trainer or the critic died; the same order resumes.
        RewardError, PageError: a reward function, or a page of the user's own, failed; the same order resumes.
        Interrupted: by a signal, without a checkpoint of what was trained last; the same order resumes.
    """
    _refuse_what_cannot_run(order)
    before = Before(order.run_dir)
    directory = open_run_directory(order.run_dir)
    try:
        with run_lock(directory.path), before.again_when_refused(), closing(FileStore(directory.path)) as store:
            await _until_it_ends(order, directory, store, before)
        if order.config.telemetry.trace:
            await asyncio.to_thread(merge, directory.path)
    except (OSError, RemoteError) as failed:
        if (why := exhausted(failed)) is None:
            raise
        raise FleetFailed(f"{why} ({directory.path}). Resume with: {order.command}") from failed
    return directory


def _refuse_what_cannot_run(order: Order) -> None:
    """Refuse reward functions, sinks and packages that are not there, and a fleet that does not fit or may not run."""
    specs = service_specs(order.config, evaluation=bool(order.config.evaluate.prompts))
    allow_descriptors(sum(spec.replicas * spec.layout.size for spec in specs))
    refuse_what_does_not_fit(order.config, order.config.model.name)
    check_sinks(order.config.telemetry.sinks)
    mistakes = [] if "reward" in order.services else check_functions(order.config)
    mistakes += page_mistakes(order.config, order.page)
    mistakes += check_functions(order.config, "cost")
    mistakes += missing_parts(order.config, model_is_made=is_complete(RunDirectory(order.run_dir).model))
    if mistakes:
        raise ConfigError("\n".join(mistakes))


async def _until_it_ends(order: Order, directory: RunDirectory, store: FileStore, before: Before) -> None:
    """Errors that the same order overcomes say so."""
    with Interrupts(order.display.say) as interrupts:
        try:
            await _run(order, directory, store, before, interrupts)
        except asyncio.CancelledError:
            if not interrupts.abandoned:
                raise
            raise Interrupted(_left_off(order, store, interrupts.abandoned)) from None
        except FleetFailed as failed:
            raise FleetFailed(_resumable(failed, order.command), failed.exit_code) from failed
        except (RewardError, PageError) as failed:
            raise type(failed)(_resumable(failed, order.command)) from failed


async def _run(order: Order, directory: RunDirectory, store: FileStore, before: Before, interrupts: Interrupts) -> None:
    plan = plan_resume(store)
    if nothing_left(order, directory, plan):
        return
    settle_config(order, directory, store, plan)
    questions = await asyncio.to_thread(load_questions, order, directory)
    model = await prepare(order.config, directory.model, order.display.say)
    refuse_without_context(order.config, model)
    refuse_what_does_not_fit(order.config, str(model))  # Its size may not have been known before.
    judges = await asyncio.to_thread(judges_folders, order.config, model)
    taken_up = take_up(order.config, directory, store, plan)
    facts = facts_of(order.config, directory, model, taken_up)
    async with _fleet(order, questions, facts, interrupts, judges) as running:
        before.begun = True
        with long_lived():
            await _Training(order, taken_up, questions, running, interrupts).run()


def _resumable(failed: Exception, command: str) -> str:
    """What an error says, with the command that resumes; the supervisor says it already, the others do not know."""
    told = str(failed)
    return told if command in told else f"{told.removesuffix('.')}. Resume with: {command}"


def _left_off(order: Order, store: FileStore, why: str) -> str:
    """What a run that was abandoned leaves behind, and how to go on."""
    if made := versions(store):
        newest = f"the newest checkpoint is of step {made[-1]} ({order.run_dir / 'checkpoints' / str(made[-1])})"
    else:
        newest = "there is no checkpoint yet, and nothing was trained"
    return f"{why}; {newest}. Go on with: {order.command}"


# ---- the fleet -------------------------------------------------------------------------------------------


@asynccontextmanager
async def _fleet(
    order: Order, questions: Questions, facts: RunFacts, interrupts: Interrupts, judges: Mapping[str, Path]
) -> AsyncIterator[RunningFleet]:
    config = order.config
    options = {name: {"model": str(folder)} for name, folder in judges.items()}
    logs = Path(facts.run_dir) / "logs"
    options["generation"] = {"longest_prompts": str(logs / LONGEST)}
    options["training"] = {"pretrain": str(logs / PRETRAIN)}
    asked_for = service_specs(config, evaluation=bool(questions.held_out))
    async with AsyncExitStack() as scope:
        launcher = None
        if config.fleet.wire != "inproc":
            launcher = scope.enter_context(LocalLauncher(facts.run, config.fleet.wire))
            scope.enter_context(interrupts.hurrying(launcher.hurry))
            options["training"] |= {"meeting": str(launcher.sockets / "training.meeting")}
        specs = [
            replace(spec, options={**spec.options, **options.get(spec.name, {})})
            for spec in (order.services.get(each.name, each) for each in asked_for)
        ]
        order.display.say(f"starting {', '.join(spec.name for spec in specs)}")
        yield await scope.enter_async_context(
            running_fleet(specs, facts, launcher=launcher, report=order.display.say, resume=order.command)
        )


class _Training:
    """One controller on one running fleet, with everything that looks on."""

    def __init__(
        self, order: Order, taken_up: TakenUp, questions: Questions, running: RunningFleet, interrupts: Interrupts
    ) -> None:
        self._order, self._config, self._taken_up = order, order.config, taken_up
        self._running, self._fleet = running, running.fleet
        self._interrupts, self._stopping = interrupts, False
        self._impatient: asyncio.TimerHandle | None = None
        self._last_commit = taken_up.plan.version if taken_up.plan else -1
        self._questions = questions
        # Twice what can be in flight: no member of a good group is among so many.
        patience = 2 * taken_up.gate.config.cap * taken_up.gate.config.members
        self._failures = RewardFailures(patience, order.display.say)
        self._page_drops = PageDrops(patience, taken_up.gate.config.baseline, taken_up.gate.version)
        self._poisoned = Poisoned(order.display.say)
        self._evaluations: EvaluationSchedule | None = None
        if questions.held_out:
            assert self._fleet.evaluation is not None, "started for these questions"
            evaluator = Evaluator(
                self._fleet.evaluation, self._fleet.reward, questions.held_out, self._config, self._fleet.cost
            )
            self._evaluations = EvaluationSchedule(
                self._fleet, evaluator, Patience.of(self._config), self._evaluated, self._not_evaluated
            )

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
            self._running.about_page = self._controller.standing
            try:
                async with self._looking_on():
                    with self._interrupts.ending_in_order(self._stop):
                        await self._until_done()
                        await self._finish()
            except DeadlineExceeded as late:  # Others are killed or tried again: this was one that trains.
                raise FleetFailed(str(late)) from late

    # ---- training ----------------------------------------------------------------------------------------

    async def _until_done(self) -> None:
        page = self._order.page or page_of(self._config)
        try:
            await self._controller.run(naming_rows(page, self._questions, self._config.seed))
        finally:
            if self._impatient is not None:
                self._impatient.cancel()

    def _stop(self) -> None:
        """Let the running iteration end, but not for ever."""
        self._order.display.say(
            f"ending with a checkpoint, after the running iteration (at most {STOP_PATIENCE:.0f} s); "
            "Ctrl-C once more abandons the wait"
        )
        self._stopping = True
        self._controller.stop()
        why = f"the running iteration did not end within {STOP_PATIENCE:.0f} s of Ctrl-C"
        self._impatient = asyncio.get_running_loop().call_later(STOP_PATIENCE, self._interrupts.abandon, why)

    async def _between(self, version: int) -> None:
        every = self._config.training.checkpoint_every
        if self._last_commit < 0 or (every and version - self._last_commit >= every):
            await self._commit(version)

    async def _commit(self, version: int) -> None:
        async def write(directory: str) -> Any:
            made = await self._fleet.training.checkpoint(directory, self._taken_up.epoch, version)
            for critic in filter(None, (self._fleet.critic, self._fleet.cost_critic)):
                learnt = await critic.checkpoint(directory, self._taken_up.epoch, version)
                made = replace(made, files={**made.files, **learnt.files})
            return made

        await commit(self._taken_up.journal, write, self._config.training.keep_checkpoints)
        self._last_commit = version

    async def _finish(self) -> None:
        if self._controller.version > self._last_commit:
            await self._commit(self._controller.version)
        if self._evaluations is not None and not self._stopping:
            await self._evaluations.finish(await self._fleet.training.published())
        await self._recorder.drain()
        staleness = self._controller.staleness
        for said in (staleness.lengths.report(self._taken_up.gate.samples()), staleness.advice()):
            if said:
                self._order.display.say(said)

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
        news = News(self._running, self._controller)
        beside = {"recorder": self._recorder.run(), "news of workers": news.follow()}
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
            raise (error := first(errors)) from error.__cause__

    def _observe(self, event: Event) -> None:
        self._recorder.observe(event)
        self._page_drops.observe(event)
        match event:
            case SampleScored(score=score):
                self._failures.observe(score)
            case GroupPoisoned():
                self._poisoned.observe(event)
            case PoliciesApart(warning):
                self._order.display.say(warning)
            case GroupFinished(poison=False):
                self._running.progressed()
            case StepDone(report=report) if report.published and self._evaluations is not None:
                if report.version % self._config.evaluate.every == 0 and report.version < self._config.steps:
                    self._evaluations.ask(report.published)
            case _:
                pass

    def _not_evaluated(self, version: int, why: str) -> None:
        self._order.display.say(f"version {version} is not evaluated: {why}")

    def _evaluated(self, evaluation: Evaluation) -> None:
        self._recorder.evaluated(evaluation)
        cost = "" if evaluation.cost is None else f", cost {evaluation.cost:.3f}"
        self._order.display.say(
            f"held out, version {evaluation.version}: reward {evaluation.mean:.3f} ± {evaluation.stderr:.3f}{cost} "
            f"over {evaluation.prompts} prompts"
        )

    def _evict(self, reader: str) -> None:
        self._order.display.say(f"{reader} did not take over new weights in time; it is killed and started again")
        self._running.kill(reader)


def _sampling(config: Config, epoch: int) -> Sampling:
    generation = config.generation
    return Sampling(generation.temperature, generation.max_new_tokens, generation.deadline, config.seed, epoch)


def naming_rows(page: Page, questions: Questions, seed: int) -> Page:
    """The same page; a prompt that generation refuses is named by its row."""

    async def roll_out(fleet: Fleet, gate: Controller, group: Attempt) -> None:
        try:
            await page.roll_out(fleet, gate, group)
        except* TaskError as refused:
            raise TaskError(f"{questions.where(group.prompts.id, seed)}: {first(refused)}") from None

    return replace(page, roll_out=roll_out)
