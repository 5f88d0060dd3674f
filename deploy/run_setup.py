"""Runs an experiment in one process tree: from a request to a trained model in a run directory.

open or resume the directory ──> prompts, model ──> fleet ──> Controller.run(algorithm) ──> last checkpoint, evaluation
"""

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncrl.algorithms.select import advantages_of, algorithm_of
from asyncrl.config.gate_config import GateConfig
from asyncrl.config.problems import refuse
from asyncrl.config.schema import Config
from asyncrl.config.sources import read
from asyncrl.config.sources.resume import check_resume
from asyncrl.config.toml_writer import dump
from asyncrl.controller.algorithm import Algorithm
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.checkpoints import ResumePlan, plan_resume, resume, versions
from asyncrl.controller.journal.journal import Journal, surviving
from asyncrl.controller.journal.ledger import Trained
from asyncrl.controller.journal.run_storage import FileStore, run_lock
from asyncrl.controller.training_run import Questions, RunState, TrainingRun
from asyncrl.deploy.preflight import allow_descriptors, model_problems, preflight
from asyncrl.deploy.process.fork_client import Forks, forks_of
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.deploy.process.stop_signals import StopSignals
from asyncrl.deploy.service_specs import service_specs, worker_count
from asyncrl.engines.models.model_folder import is_complete, scoring_model_folders
from asyncrl.engines.models.model_preparation import prepare
from asyncrl.errors import AlgorithmError, FleetFailed, Interrupted, RemoteError, RewardError, errno_in
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.fleet.leftover_cleanup import new_start
from asyncrl.fleet.worker.gc_freeze import gc_frozen
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.tasks import Draw, held_out_prompts, training_prompts
from asyncrl.tasks.prompt_lengths import write_longest
from asyncrl.tasks.prompt_sources import Rows, write_texts
from asyncrl.telemetry.display import Display
from asyncrl.telemetry.jsonl import read_lines
from asyncrl.telemetry.run_directory import DirectoryRollback, RunDirectory, open_run_directory, replace_text
from asyncrl.telemetry.trace import merge_traces

LONGEST = "longest_prompts.jsonl"
"""File in the run's logs with the prompts whose tokens are counted before anything is trained."""
PRETRAIN = "pretrain.jsonl"
"""File in the run's logs with the texts that the trainer learns besides its samples."""
HEARTBEAT = 10.0
"""Seconds between heartbeats. Three missing ones mean that a worker's host is gone; loading a model takes less."""

CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file has reached the size that this user may write (ulimit -f)",
    errno.EMFILE: "a process has as many files open as it may (ulimit -n)",
    errno.ENFILE: "this machine has as many files open as it can",
    errno.ENOMEM: "there is not enough memory",
}
"""Resources that run out, by error number."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run that the user requests.

    command: resumes the run. prompts, algorithm, services: Python objects that replace those of the config, such as
    rewards in this process. forks: what workers are forked from, if it was started already.
    """

    config: Config
    run_dir: Path
    display: Display
    command: str
    accept_changes: bool = False
    prompts: Rows | None = None
    algorithm: Algorithm | None = None
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    forks: Forks | None = None


async def run(request: RunRequest) -> RunDirectory:
    """Trains as requested; the same request with the same directory resumes the run.

    Raises ConfigError or TaskError for a mistake of the user, if possible before anything is started. The same request
    resumes after FleetFailed (the trainer or a critic died), RewardError, AlgorithmError and Interrupted (by a signal).
    """
    _check(request)
    rollback = DirectoryRollback(request.run_dir)
    directory = open_run_directory(request.run_dir)
    try:
        with (
            run_lock(directory.path),
            rollback.again_when_refused(),
            closing(FileStore(directory.path)) as store,
            StopSignals(request.display.say) as signals,
            _resume_advice(request, store, signals),
        ):
            plan = plan_resume(store)
            if not nothing_left(request, directory, plan):
                await _train(request, directory, store, plan, rollback, signals)
        if request.config.telemetry.trace:
            await asyncio.to_thread(merge_traces, directory.path)
    except (OSError, RemoteError) as failed:
        if (why := exhausted(failed)) is None:
            raise
        raise FleetFailed(f"{why} ({directory.path}). Resume with: {request.command}") from failed
    return directory


def _check(request: RunRequest) -> None:
    """Prints warnings, and raises ConfigError with all problems that keep the run from starting."""
    made = is_complete(RunDirectory(request.run_dir).model)
    problems = list(preflight(request.config, algorithm=request.algorithm, served=request.services, model_is_made=made))
    refuse(problems)
    for warning in problems:
        request.display.say(f"warning: {warning}")
    allow_descriptors(worker_count(request.config))


def exhausted(error: Exception) -> str | None:
    """Returns which resource ran out if that caused the error, else None. Errors of workers arrive as texts."""
    number = errno_in(error.message) if isinstance(error, RemoteError) else getattr(error, "errno", None)
    return f"{CAUSES[number]}: {error}" if number in CAUSES else None


@contextmanager
def _resume_advice(request: RunRequest, store: FileStore, signals: StopSignals) -> Iterator[None]:
    """Adds the command that resumes to errors after which the same request can go on."""
    try:
        yield
    except asyncio.CancelledError:
        if not signals.abandoned:
            raise
        newest = "there is no checkpoint yet, and nothing was trained"
        if made := versions(store):
            newest = f"the newest checkpoint is of step {made[-1]} ({request.run_dir / 'checkpoints' / str(made[-1])})"
        raise Interrupted(f"{signals.abandoned}; {newest}. Go on with: {request.command}") from None
    except (FleetFailed, RewardError, AlgorithmError) as failed:
        # The supervisor's errors have the command already.
        if request.command in str(failed):
            raise
        advice = f"{str(failed).removesuffix('.')}. Resume with: {request.command}"
        if isinstance(failed, FleetFailed):
            raise FleetFailed(advice, failed.exit_code) from failed
        raise type(failed)(advice) from failed


async def _train(
    request: RunRequest,
    directory: RunDirectory,
    store: FileStore,
    plan: ResumePlan | None,
    rollback: DirectoryRollback,
    signals: StopSignals,
) -> None:
    config, display = request.config, request.display
    with forks_of(config, request.forks, display.say) as forks:
        settle_config(request, directory, store, plan)
        questions = await asyncio.to_thread(load_questions, request, directory)
        model = await prepare(config, directory.model, display.say)
        refuse(model_problems(config, model))  # The model may not have been on this machine before.
        scorers = await asyncio.to_thread(scoring_model_folders, config, model)
        state = restore_run(config, directory, store, plan)
        facts = facts_of(config, directory, model, state)
        algorithm, advantages = request.algorithm or algorithm_of(config), advantages_of(config)
        async with _fleet(replace(request, forks=forks), questions, facts, signals, scorers) as running:
            rollback.begun = True
            with gc_frozen():
                run = TrainingRun(
                    state, questions, algorithm, advantages, running, display, signals.ending_in_order, signals.abandon
                )
                await run.run()


def nothing_left(request: RunRequest, directory: RunDirectory, plan: ResumePlan | None) -> bool:
    """Returns, and prints, whether all steps are trained and the last version is evaluated if the config wants it."""
    config = request.config
    if plan is None or plan.version < config.steps:
        return False
    evaluations = read_lines(directory.evaluations) if config.evaluate.prompts else []
    if config.evaluate.prompts and all(line["version"] != plan.version for line in evaluations):
        return False
    beyond = f", beyond the {config.steps} asked for" if plan.version > config.steps else ""
    for line in (*plan.said, f"already done at step {plan.version}{beyond}; nothing to do (raise steps to go on)"):
        request.display.say(line)
    return True


def settle_config(request: RunRequest, directory: RunDirectory, store: FileStore, plan: ResumePlan | None) -> None:
    """Refuses a changed config, prints what a resume takes over, and writes config.toml. At a first start it removes a
    model that an earlier start made of another config."""
    config = request.config
    if plan is not None:
        changes = check_resume(directory.path, config, request.accept_changes)
        for line in (*plan.said, *(f"changed: {change}" for change in changes)):
            request.display.say(line)
        request.display.say(
            f"resuming {directory.path} at step {plan.version} of {config.steps}{_repeated_steps(store, plan)}: "
            f"model, optimizer and journal are taken over, {len(plan.ledger.groups)} groups in flight start again"
        )
    elif directory.config.exists():
        then = read(directory.config)
        if (then.model.name, then.seed) != (config.model.name, config.seed):
            shutil.rmtree(directory.model, ignore_errors=True)
    replace_text(directory.config, dump(config))


def _repeated_steps(store: FileStore, plan: ResumePlan) -> str:
    """Returns which steps were trained after the checkpoint and are trained again."""
    beyond = (framed.record for framed in surviving(store) if framed.start >= plan.offset)
    last = max((record.version for record in beyond if isinstance(record, Trained)), default=plan.version)
    if last == plan.version:
        return ""
    steps = f"steps {plan.version + 1} to {last} are" if last > plan.version + 1 else f"step {last} is"
    return f"; {steps} done again"


def load_questions(request: RunRequest, directory: RunDirectory) -> Questions:
    """Reads all prompts; raises TaskError for mistakes in them."""
    config = request.config
    prompts, held_out = training_prompts(config, request.prompts), held_out_prompts(config)
    name = f"task.prompts: {config.task.prompts if request.prompts is None else 'the rows given as prompts'}"
    sources = {name: prompts}
    if held_out is not None:
        sources[f"evaluate.prompts: {config.evaluate.prompts}"] = held_out
    if config.task.pretrain:
        write_texts(directory.logs / PRETRAIN, config.task)
    write_longest(directory.logs / LONGEST, sources)
    questions = held_out.first(config.evaluate.size) if held_out is not None else []
    return Questions(Draw(prompts, config.seed), questions, name, len(prompts))


def restore_run(config: Config, directory: RunDirectory, store: FileStore, plan: ResumePlan | None) -> RunState:
    """Makes a new gate and journal, or restores those of the checkpoint in `plan`."""
    gate_config = GateConfig.of(config)
    if plan is None:
        return RunState(directory, Journal(store), Gate(gate_config), None)
    journal = resume(store, plan)
    gate = Gate(gate_config, plan.version, plan.ledger.next_group)
    for group in plan.ledger.groups.values():
        gate.restore(group)
    return RunState(directory, journal, gate, plan)


def facts_of(config: Config, directory: RunDirectory, model: Path, state: RunState) -> RunFacts:
    """Names a new start of the run and returns what its workers share."""
    start, keys = new_start(directory), CurveKeys.fresh()
    return RunFacts(
        run=start,
        run_dir=directory.path,
        model_dir=model.absolute(),
        incarnation=state.incarnation,
        weights_arena=f"asyncrl-{start}-{state.incarnation}-weights",
        config=config,
        checkpoint_dir=Path(state.plan.directory) if state.plan else None,
        curve=(keys.public, keys.secret),
        heartbeat=HEARTBEAT if config.fleet.wire == "tcp" else None,
    )


@asynccontextmanager
async def _fleet(
    request: RunRequest, questions: Questions, facts: RunFacts, signals: StopSignals, scorers: Mapping[str, Path]
) -> AsyncIterator[RunningFleet]:
    """Starts the services of the run. scorers: folders of scoring models by service."""
    config, logs = request.config, facts.run_dir / "logs"
    options = {name: {"model": str(folder)} for name, folder in scorers.items()}
    options["generation"] = {"longest_prompts": str(logs / LONGEST)}
    options["training"] = {"pretrain": str(logs / PRETRAIN)}
    async with AsyncExitStack() as scope:
        launcher = None
        if config.fleet.wire != "inproc":
            launcher = scope.enter_context(LocalLauncher(facts.run, config.fleet.wire, request.forks))
            signals.hurry = launcher.hurry
            options["training"]["meeting"] = str(launcher.sockets / "training.meeting")
        wanted = service_specs(config)
        given = [request.services.get(spec.name, spec) for spec in wanted]
        specs = [replace(spec, options={**spec.options, **options.get(spec.name, {})}) for spec in given]
        request.display.say(f"starting {', '.join(spec.name for spec in specs)}")
        yield await scope.enter_async_context(
            running_fleet(specs, facts, launcher=launcher, report=request.display.say, resume=request.command)
        )
