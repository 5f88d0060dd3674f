"""Runs an experiment in one process tree: from a request to a trained model in a run directory.

open or resume the directory ──> prompts, model ──> fleet ──> Controller.run(algorithm) ──> last checkpoint, evaluation
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

from asyncrl.algorithms.select import advantages_of, algorithm_of
from asyncrl.config.problems import refuse
from asyncrl.controller.journal.checkpoints import ResumePlan, plan_resume, versions
from asyncrl.controller.journal.journal_store import FileStore
from asyncrl.controller.journal.run_lock import run_lock
from asyncrl.controller.session import Questions, Session
from asyncrl.deploy.checks.resource_limits import allow_descriptors, exhausted
from asyncrl.deploy.preflight import model_problems, preflight
from asyncrl.deploy.process.fork_client import forks_of
from asyncrl.deploy.process.interrupts import Interrupts
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.deploy.run_request import (
    LONGEST,
    PRETRAIN,
    RunRequest,
    facts_of,
    load_questions,
    nothing_left,
    restore_run,
    settle_config,
)
from asyncrl.deploy.service_specs import service_specs, worker_count
from asyncrl.engines.models.folder_checks import is_complete, scoring_model_folders
from asyncrl.engines.models.model_folder import prepare
from asyncrl.errors import (
    AlgorithmError,
    FleetFailed,
    Interrupted,
    RemoteError,
    RewardError,
)
from asyncrl.fleet.fleet import RunningFleet, running_fleet
from asyncrl.fleet.worker.gc_freeze import gc_frozen
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.telemetry.run_directory import DirectoryRollback, RunDirectory, open_run_directory
from asyncrl.telemetry.trace_merge import merge


async def run(request: RunRequest) -> RunDirectory:
    """Trains as requested; the same request with the same directory resumes the run.

    Raises:
        ConfigError, TaskError: the user made a mistake; raised before anything is started if it is known by then.
        FleetFailed: the trainer or the critic died; the same request resumes.
        RewardError, AlgorithmError: a reward function, or a user's algorithm, failed; the same request resumes.
        Interrupted: a signal ended the run before the last steps had a checkpoint; the same request resumes.
    """
    _check(request)
    rollback = DirectoryRollback(request.run_dir)
    directory = open_run_directory(request.run_dir)
    try:
        with run_lock(directory.path), rollback.again_when_refused(), closing(FileStore(directory.path)) as store:
            await _run_with_advice(request, directory, store, rollback)
        if request.config.telemetry.trace:
            await asyncio.to_thread(merge, directory.path)
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


async def _run_with_advice(
    request: RunRequest, directory: RunDirectory, store: FileStore, rollback: DirectoryRollback
) -> None:
    """Runs, and adds the command that resumes to errors after which the same request can go on."""
    with Interrupts(request.display.say) as interrupts:
        try:
            await _run(request, directory, store, rollback, interrupts)
        except asyncio.CancelledError:
            if not interrupts.abandoned:
                raise
            raise Interrupted(_interruption(request, store, interrupts.abandoned)) from None
        except FleetFailed as failed:
            raise FleetFailed(_resumable(failed, request.command), failed.exit_code) from failed
        except (RewardError, AlgorithmError) as failed:
            raise type(failed)(_resumable(failed, request.command)) from failed


async def _run(
    request: RunRequest,
    directory: RunDirectory,
    store: FileStore,
    rollback: DirectoryRollback,
    interrupts: Interrupts,
) -> None:
    plan = plan_resume(store)
    if nothing_left(request, directory, plan):
        return
    with forks_of(request.config, request.forks, request.display.say) as forks:
        await _train(replace(request, forks=forks), directory, store, rollback, interrupts, plan)


async def _train(
    request: RunRequest,
    directory: RunDirectory,
    store: FileStore,
    rollback: DirectoryRollback,
    interrupts: Interrupts,
    plan: ResumePlan | None,
) -> None:
    settle_config(request, directory, store, plan)
    questions = await asyncio.to_thread(load_questions, request, directory)
    model = await prepare(request.config, directory.model, request.display.say)
    refuse(model_problems(request.config, model))  # The model may not have been on this machine before.
    scorers = await asyncio.to_thread(scoring_model_folders, request.config, model)
    run_state = restore_run(request.config, directory, store, plan)
    facts = facts_of(request.config, directory, model, run_state)
    async with _fleet(request, questions, facts, interrupts, scorers) as running:
        rollback.begun = True
        with gc_frozen():
            await Session(
                request.config,
                run_state,
                questions,
                request.algorithm or algorithm_of(request.config),
                advantages_of(request.config),
                running,
                request.display,
                interrupts,
            ).run()


def _resumable(failed: Exception, command: str) -> str:
    """Returns the text of an error with the command that resumes; the supervisor's errors have the command already."""
    text = str(failed)
    return text if command in text else f"{text.removesuffix('.')}. Resume with: {command}"


def _interruption(request: RunRequest, store: FileStore, why: str) -> str:
    """Returns what an interrupted run leaves behind, and how to resume it."""
    if made := versions(store):
        newest = f"the newest checkpoint is of step {made[-1]} ({request.run_dir / 'checkpoints' / str(made[-1])})"
    else:
        newest = "there is no checkpoint yet, and nothing was trained"
    return f"{why}; {newest}. Go on with: {request.command}"


# ---- the fleet -------------------------------------------------------------------------------------------


@asynccontextmanager
async def _fleet(
    request: RunRequest, questions: Questions, facts: RunFacts, interrupts: Interrupts, scorers: Mapping[str, Path]
) -> AsyncIterator[RunningFleet]:
    config = request.config
    options = {name: {"model": str(folder)} for name, folder in scorers.items()}
    logs = Path(facts.run_dir) / "logs"
    options["generation"] = {"longest_prompts": str(logs / LONGEST)}
    options["training"] = {"pretrain": str(logs / PRETRAIN)}
    wanted = service_specs(config, evaluation=bool(questions.held_out))
    async with AsyncExitStack() as scope:
        launcher = None
        if config.fleet.wire != "inproc":
            launcher = scope.enter_context(LocalLauncher(facts.run, config.fleet.wire, request.forks))
            scope.enter_context(interrupts.hurrying(launcher.hurry))
            options["training"] |= {"meeting": str(launcher.sockets / "training.meeting")}
        specs = [
            replace(spec, options={**spec.options, **options.get(spec.name, {})})
            for spec in (request.services.get(each.name, each) for each in wanted)
        ]
        request.display.say(f"starting {', '.join(spec.name for spec in specs)}")
        yield await scope.enter_async_context(
            running_fleet(specs, facts, launcher=launcher, report=request.display.say, resume=request.command)
        )
