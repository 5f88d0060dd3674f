"""Runs an experiment in one process tree: from a request to a trained model in a run directory.

open or resume the directory ──> prompts, model ──> fleet ──> Controller.run(algorithm) ──> last checkpoint, evaluation
"""

import asyncio
import errno
import shlex
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

from asyncrl.algorithms.algorithm_by_name import advantages_of, algorithm_of
from asyncrl.concurrency import running_beside
from asyncrl.config.gate_config import GateConfig
from asyncrl.config.install_hints import program
from asyncrl.config.named_files import source_files
from asyncrl.config.problems import Problem, refuse
from asyncrl.config.schema import Config
from asyncrl.config.secret_places import note_places
from asyncrl.config.sections.secret import keep_secrets, secret_paths
from asyncrl.config.sources import read
from asyncrl.config.sources.resume import check_resume
from asyncrl.config.toml_writer import dump
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.checkpoints import (
    NOTHING_SAVED,
    ResumePlan,
    SavedSamples,
    plan_resume,
    resume,
    versions,
)
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.run_storage import FileStore, run_lock
from asyncrl.controller.observers.progress import RunProgress, progress_shown
from asyncrl.controller.recovery import train_with_returns
from asyncrl.controller.training_run import Questions, RunState, TrainingRun
from asyncrl.deploy.checks.model_checks import here
from asyncrl.deploy.checks.run_prompts import questions_of, read_prompts, with_steps_of_epochs
from asyncrl.deploy.preflight import model_problems, preflight, scoring_folders, step_callback
from asyncrl.deploy.process.fork_client import forks_of
from asyncrl.deploy.process.interrupts import StopSignals
from asyncrl.deploy.process.local_launcher import allow_descriptors
from asyncrl.deploy.process.stored_runs import OnCommit, copies_of
from asyncrl.deploy.run_fleet import LONGEST, PRETRAIN, RunRequest, facts_of, run_fleet
from asyncrl.deploy.service_specs import worker_count
from asyncrl.engines.models.model_folder import is_complete
from asyncrl.engines.models.model_preparation import prepare, remove_model
from asyncrl.engines.models.model_shape import shape_of
from asyncrl.errors import (
    AlgorithmError,
    AsyncrlError,
    ConfigError,
    FleetFailed,
    Interrupted,
    JournalError,
    NonFiniteLoss,
    OnlyTruncated,
    PolicyMismatch,
    RemoteError,
    RewardError,
    TrainingStopped,
    errno_in,
)
from asyncrl.fleet.failure_table import MISTAKES
from asyncrl.fleet.fleet import MOST_WORKERS
from asyncrl.fleet.worker.process_memory import YOUNG_OF_CALLER, gc_frozen
from asyncrl.tasks.prompt_sources import write_texts
from asyncrl.tasks.reward_trial import try_rewards
from asyncrl.telemetry.display import Display, LoggedDisplay
from asyncrl.telemetry.jsonl import read_lines, read_metrics
from asyncrl.telemetry.logs import open_log, repeated
from asyncrl.telemetry.run_directory import (
    CONTROLLER_LOG,
    DirectoryRollback,
    RunDirectory,
    open_run_directory,
    replace_text,
)
from asyncrl.telemetry.source_copies import INDEX, SourceFile, changed, keep, kept, look_at, moved
from asyncrl.telemetry.trace import merge_traces

CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file has reached the size that this user may write (ulimit -f)",
    errno.EMFILE: "a process has as many files open as it may (ulimit -n)",
    errno.ENFILE: "this machine has as many files open as it can",
    errno.ENOMEM: "there is not enough memory",
}
"""Resources that run out, by error number."""
DEADLINE = 20.0
HURRIED = 5.0
"""Seconds for the report, which takes about two; after a signal, whose sender waits for the end, the fewer."""
WRITE = ("-m", "asyncrl.deploy.cli", "report")

TO_CORRECT = (*MISTAKES, ConfigError, PolicyMismatch, TrainingStopped, NonFiniteLoss, OnlyTruncated, JournalError)
"""Errors after which the same command goes on, once a person has corrected what they name."""


async def run(request: RunRequest) -> RunDirectory:
    """Trains as requested; the same request with the same directory resumes the run.

    Raises ConfigError or TaskError for a mistake of the user, if possible before anything is started. Once there is a
    checkpoint, the same request resumes after each error of what was started, whose exit status is 75; an error that is
    none of asyncrl's own arrives as FleetFailed, unless a program calls.
    """
    config = await asyncio.to_thread(with_steps_of_epochs, request.config, request.prompts)
    request = replace(request, config=_with_date(config, RunDirectory(request.run_dir)))
    warnings = _check(request)
    rollback = DirectoryRollback(request.run_dir)
    directory = open_run_directory(request.run_dir)
    try:
        with (
            open_log(directory.logs / CONTROLLER_LOG, service="controller") as log,
            run_lock(directory.path),
            rollback.again_when_refused(),
            closing(FileStore(directory.path)) as store,
            StopSignals(request.display.say) as signals,
            _noted_end(request := replace(request, display=LoggedDisplay(request.display, log))),
            _resume_advice(request, store, signals),
        ):
            for warning in warnings:
                request.display.say(f"warning: {warning}")
            with _refusing_to_start():
                await _prepare_again(request, directory, store)
                plan = await asyncio.to_thread(plan_resume, store)
                is_done = nothing_left(request, directory, plan)
            async with copies_of(request.store, directory.path, store, request.display.say) as on_commit:
                if not is_done:
                    async with progress_shown(request.display.progress) as progress:
                        await _train(request, directory, store, plan, rollback, signals, progress, on_commit)
                request.display.settle()
                if request.config.telemetry.report and directory.metrics.exists():
                    deadline = HURRIED if signals.is_ending else DEADLINE
                    await report_run(directory.path, request.display.say, deadline)
            for line in await asyncio.to_thread(_closing_lines, request, directory):
                request.display.say(line)
        if request.config.telemetry.trace:
            await asyncio.to_thread(merge_traces, directory.path)
    except (OSError, RemoteError) as failed:
        if (why := exhausted(failed)) is None:
            raise
        raise FleetFailed(f"{why} ({directory.path}). Resume with: {request.command}") from failed
    return directory


def _with_date(config: Config, directory: RunDirectory) -> Config:
    """Returns the config with the date that chat templates are given: where it names none, that of the first start."""
    if config.task.date or config.acting.env:
        return config
    first = read(directory.config).task.date if directory.started_before else date.today().isoformat()
    return config.model_copy(update={"task": config.task.model_copy(update={"date": first})})


@contextmanager
def _noted_end(request: RunRequest) -> Iterator[None]:
    """Notes in the controller's log that the run starts, and how it ends."""
    request.display.note("run starts", command=request.command)
    try:
        yield
    finally:
        error = sys.exception()
        request.display.note("run ends", **({"error": f"{type(error).__name__}: {error}"} if error else {}))


def _closing_lines(request: RunRequest, directory: RunDirectory) -> list[str]:
    """Returns the lines that end a run: the commands that go on, and the warnings that it gave. Nothing stands below
    the command that resumes."""
    warned = [f"warned: {line}" for line in repeated(directory.warnings)]
    done = max((int(line["version"]) for line in read_metrics(directory.metrics)), default=0)
    if done < request.config.steps:
        return [*warned, f"stopped at step {done} of {request.config.steps}; go on with: {request.command}"]
    quoted = shlex.quote(str(directory.path))
    return [f"done; next: `{program()} samples {quoted}`, `{program()} export {quoted} TARGET`", *warned]


def _check(request: RunRequest) -> list[Problem]:
    """Returns warnings, and raises ConfigError with all problems that keep the run from starting."""
    made = is_complete(RunDirectory(request.run_dir).model)
    problems = list(
        preflight(
            request.config,
            places=request.places,
            algorithm=request.algorithm,
            served=request.services,
            model_is_made=made,
        )
    )
    refuse(problems)
    allow_descriptors(worker_count(request.config) + MOST_WORKERS)  # It may be scaled up as far.
    return problems


def _check_model(config: Config, model: Path, display: Display, *, was_checked: bool) -> None:
    """Checks again what depends on the model, which may not have been on this machine when the run was checked."""
    problems = [] if config.acting.env else list(model_problems(config, model))
    refuse(problems)
    for warning in [] if was_checked else problems:
        display.say(f"warning: {warning}")


@contextmanager
def _refusing_to_start() -> Iterator[None]:
    """Lets mistakes that are found before workers start keep their exit status: they refuse a start, and end no run."""
    try:
        yield
    except AsyncrlError as refused:
        refused.is_refusal = True
        raise


@contextmanager
def _resume_advice(request: RunRequest, store: FileStore, signals: StopSignals) -> Iterator[None]:
    """Adds the command that resumes to errors after which the same request can go on. The end of a run that has a
    checkpoint has exit status 75, whatever ended it."""
    try:
        yield
    except asyncio.CancelledError:
        if not signals.abandoned:
            raise
        newest = "there is no checkpoint yet, and nothing was trained"
        if made := versions(store):
            newest = f"the newest checkpoint is of step {made[-1]} ({request.run_dir / 'checkpoints' / str(made[-1])})"
        raise Interrupted(f"{signals.abandoned}; {newest}. Go on with: {request.command}") from None
    except (Interrupted, BrokenPipeError):
        raise
    except Exception as failed:  # Code of the user runs in this process too, and whatever ends a run, it is an end.
        is_known = isinstance(failed, AsyncrlError | OSError)
        is_refusal = getattr(failed, "is_refusal", False)
        # The supervisor's errors have the command already, and what a full disk says is explained further up.
        if request.command in str(failed) or (is_known and exhausted(failed) is not None):
            raise
        if is_refusal and isinstance(failed, ConfigError | JournalError):
            raise  # The same command does not go on.
        has_checkpoint = bool(versions(store))
        if not (has_checkpoint or isinstance(failed, FleetFailed | RewardError | AlgorithmError)):
            raise
        if request.is_call and not is_known:
            failed.add_note(f"Resume with: {request.command}")
            raise
        if not is_known:
            traceback.print_exception(failed)
        text = str(failed) if is_known else f"{type(failed).__name__}: {failed}"
        advice = f"{text.removesuffix('.')}. Resume with: {request.command}"
        ended = (type(failed) if isinstance(failed, TO_CORRECT) else FleetFailed)(advice)
        if has_checkpoint and not is_refusal:
            ended.exit_code = FleetFailed.exit_code
        raise ended from failed


async def _train(
    request: RunRequest,
    directory: RunDirectory,
    store: FileStore,
    plan: ResumePlan | None,
    rollback: DirectoryRollback,
    signals: StopSignals,
    progress: RunProgress,
    on_commit: OnCommit | None,
) -> None:
    config = request.config
    display = request.display
    progress.begin("reading the prompts and the model")
    with forks_of(config, request.forks, display.say) as forks:
        with _refusing_to_start():
            restored = await asyncio.to_thread(settle_config, request, directory, plan)
            model, questions = await _read_texts_and_model(request, directory, progress, is_new=plan is None)
            scorers = await asyncio.to_thread(scoring_folders, config, model, directory.hub)
            state = await asyncio.to_thread(restore_run, config, directory, store, plan, restored, on_commit)
        facts = facts_of(config, directory, model, state)
        progress.begin("starting the workers")
        fleet = run_fleet(replace(request, forks=forks), facts, signals, scorers, state.pauses)
        async with _spans_sent(config, directory, display), fleet as running:
            rollback.begun = True
            display.say(f"run directory: {directory.path}")
            with gc_frozen(YOUNG_OF_CALLER) as frozen:
                on_end = (signals.ending_in_order, signals.abandon)
                observers = (*on_end, progress, frozen, request.on_step or step_callback(config))

                async def train(now: RunState) -> None:
                    algorithm = request.algorithm or algorithm_of(config)
                    advantages = advantages_of(config)
                    await TrainingRun(now, questions, algorithm, advantages, running, display, *observers).run()

                await train_with_returns(
                    *(running, state, train, partial(_resumed, request, directory, store), store),
                    most=config.fleet.trainer_restarts,
                    may_return=lambda: not signals.is_ending,
                    say=display.say,
                )


async def _resumed(request: RunRequest, directory: RunDirectory, store: FileStore, before: RunState) -> RunState:
    """Resumes a run whose controller has ended, in this process."""
    plan = await asyncio.to_thread(plan_resume, store)
    assert plan is not None, "it has checkpoints"
    for line in plan.said:
        request.display.say(line)
    restored = plan.restorable(whole_groups=_scores_groups(request.config))
    before.pauses.subscribers.clear()
    resumed = (request.config, directory, store, plan, restored, before.on_commit)
    return replace(await asyncio.to_thread(restore_run, *resumed), pauses=before.pauses)


async def _read_texts_and_model(
    request: RunRequest, directory: RunDirectory, progress: RunProgress, *, is_new: bool
) -> tuple[Path, Questions]:
    """Reads all texts before the model, which may take long to make, and says what the user may not expect of them.
    Raises TaskError and ConfigError for mistakes. is_new: the run does not resume, and its rewards are tried."""
    config = request.config
    say = request.display.say
    notes = list[str]()
    prompts = await asyncio.to_thread(read_prompts, config, request.prompts)
    rewards = request.services.get("reward")
    of_caller = getattr(rewards.implementation, "keywords", {}).get("functions", ()) if rewards is not None else ()
    for note in await try_rewards(config, prompts.by_key(config), of_caller) if is_new else ():
        say(f"warning: {note}")
    if config.task.pretrain:
        await asyncio.to_thread(write_texts, directory.logs / PRETRAIN, config.task)
    was_checked = shape_of(str(here(config.model))) is not None
    model = await prepare(config, directory.model, progress.noting(say))
    _check_model(config, model, request.display, was_checked=was_checked)
    longest = directory.logs / LONGEST
    questions = await asyncio.to_thread(questions_of, config, prompts, model, longest, request.places, notes.append)
    for note in notes:
        say(note)
    return model, questions


@asynccontextmanager
async def _spans_sent(config: Config, directory: RunDirectory, display: Display) -> AsyncIterator[None]:
    """Sends spans to a collector if the config names one, also those that workers write as they end."""
    if not config.telemetry.otlp:
        yield
        return
    from asyncrl.telemetry.otlp_spans import SpanExporter

    exporter = SpanExporter(config.telemetry.otlp, directory.logs, directory.run_id(), display.say)
    async with running_beside({"spans for a collector": exporter.run()}):
        yield


def nothing_left(request: RunRequest, directory: RunDirectory, plan: ResumePlan | None) -> bool:
    """Returns, and prints, whether all steps are trained and the last version is evaluated if the config wants it.
    Raises ConfigError for changes that a resume would not accept."""
    config = request.config
    if plan is None or plan.version < config.steps:
        return False
    sets = {each.name for each in config.evaluate.held_out}
    lines = read_lines(directory.evaluations) if sets else []
    if sets - {line.get("name", "") for line in lines if line["version"] == plan.version}:
        return False
    changes = _changes(request, directory, look_at(source_files(config))) if directory.config.exists() else []
    beyond = f", beyond the {config.steps} asked for" if plan.version > config.steps else ""
    changed_lines = (f"changed, for further steps: {change}" for change in changes)
    done = f"already done at step {plan.version}{beyond}; nothing to do (raise steps to go on)"
    for line in (*plan.said, *changed_lines, done):
        request.display.say(line)
    return True


def settle_config(request: RunRequest, directory: RunDirectory, plan: ResumePlan | None) -> SavedSamples:
    """Refuses changes of config and files, prints what a resume takes over, and writes config.toml and copies of files.
    At a first start it removes a model that an earlier start made of another config. Returns the samples to restore."""
    config = request.config
    files = look_at(source_files(request.config))
    restored = NOTHING_SAVED
    if plan is not None:
        changes = _changes(request, directory, files)
        if not (changes and request.accept_changes):  # What was sampled and scored before may not count after those.
            restored = plan.restorable(whole_groups=_scores_groups(config))
        for line in (*plan.said, *(f"changed: {change}" for change in changes), *unknown_sources(directory.sources)):
            request.display.say(line)
        kept = sum(len(members) for _, members in restored.waiting)
        answered = len(restored.answered)
        go_on = f"{answered} episodes go on after their last turn, " if answered else ""
        request.display.say(
            f"resuming {directory.path} at step {plan.version} of {config.steps}{_repeated_steps(plan)}: "
            f"model, optimizer and journal are taken over; of the samples in flight {kept} wait for training as they "
            f"are, {go_on}{plan.ledger.samples_in_flight - kept - answered} are sampled again"
        )
    elif directory.config.exists() and _other_model(config, directory):
        remove_model(directory.model)
        directory.hub.unlink(missing_ok=True)
    keep_secrets(config, directory.path)
    replace_text(directory.config, dump(config))
    note_places([directory.path, *secret_paths(config)])
    keep(directory.sources, files)
    return restored


def _other_model(config: Config, directory: RunDirectory) -> bool:
    """Returns whether the config of the run's last start names another model to prepare."""
    then, now = ((each.model.name, each.model.revision, each.seed) for each in (read(directory.config), config))
    return then != now


async def _prepare_again(request: RunRequest, directory: RunDirectory, store: FileStore) -> None:
    """Makes or downloads the model again where it is gone, and the only checkpoint has links to it."""
    config = request.config
    is_gone = versions(store) == [0] and not config.acting.env and not is_complete(directory.model)
    if is_gone and directory.config.exists() and not _other_model(config, directory):
        await prepare(config, directory.model, request.display.say)


def _scores_groups(config: Config) -> bool:
    """Returns whether a function scores all samples of a group together, so that those of a part cannot be."""
    return any(function.group for section in (config.reward, config.cost) for function in section.functions)


def unknown_sources(folder: Path) -> list[str]:
    """Returns a line that changes of prompts and code cannot be seen, where what the last start read is not known."""
    index = folder / INDEX
    return [] if index.is_file() else [f"warning: {index} is gone: changes of prompts and code go unseen"]


def _changes(request: RunRequest, directory: RunDirectory, files: Sequence[SourceFile]) -> list[str]:
    """Returns what changed in config and files since the run began; raises ConfigError for what is not accepted."""
    before = kept(directory.sources)
    by_key: dict[str, list[str]] = {}
    for change in changed(before, files, directory.sources):
        by_key.setdefault(change.key, []).append(str(change))
    return check_resume(directory.path, request.config, request.accept_changes, by_key, moved(before, files))


def _repeated_steps(plan: ResumePlan) -> str:
    """Returns which steps were trained after the checkpoint and are trained again."""
    if plan.last_version == plan.version:
        return ""
    several = plan.last_version > plan.version + 1
    steps = f"steps {plan.version + 1} to {plan.last_version} are" if several else f"step {plan.last_version} is"
    return f"; {steps} done again"


def restore_run(
    config: Config,
    directory: RunDirectory,
    store: FileStore,
    plan: ResumePlan | None,
    restored: SavedSamples = NOTHING_SAVED,
    on_commit: OnCommit | None = None,
) -> RunState:
    """Makes a new gate and journal, or restores those of the checkpoint in `plan`, with the samples `restored`."""
    gate_config = GateConfig.of(config)
    if plan is None:
        return RunState(directory, Journal(store), Gate(gate_config), None, on_commit=on_commit)
    journal = resume(store, plan, restored.waiting)
    gate = Gate(gate_config, plan.version, plan.ledger.next_group)
    for group in journal.ledger.groups.values():
        gate.restore(group)
    return RunState(directory, journal, gate, plan, restored, on_commit=on_commit)


def exhausted(error: Exception) -> str | None:
    """Returns which resource ran out if that caused the error, else None. Errors of workers arrive as texts."""
    number = errno_in(error.message) if isinstance(error, RemoteError) else getattr(error, "errno", None)
    return f"{CAUSES[number]}: {error}" if number in CAUSES else None


async def report_run(run_dir: Path, say: Callable[[str], None], deadline: float = DEADLINE) -> None:
    """Writes `RUN_DIR/report.html` and says so, or what went wrong and the command that tries it again."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, *WRITE, str(run_dir), stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    try:
        async with asyncio.timeout(deadline):
            _, complaint = await child.communicate()
    except TimeoutError:
        complaint = f"it took longer than {deadline:.0f} s".encode()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode == 0:
        say(f"report: {RunDirectory(run_dir).report}")
    else:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("asyncrl: ")
        say(f"the report could not be written: {last}; to try again: `{program()} report {run_dir}`")
