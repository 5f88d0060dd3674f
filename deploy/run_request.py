"""Prepares a run: the request, its config and prompts, and the state of an earlier start that it resumes."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import Config
from asyncrl.config.sources import read
from asyncrl.config.sources.resume import check_resume
from asyncrl.config.sources.toml import dump
from asyncrl.controller.algorithm import Algorithm
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.checkpoints import ResumePlan, resume
from asyncrl.controller.journal.journal import Journal, surviving
from asyncrl.controller.journal.ledger import Trained
from asyncrl.controller.journal.run_storage import FileStore
from asyncrl.controller.training_run import Questions, RunState
from asyncrl.deploy.process.fork_client import Forks
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.fleet.leftover_cleanup import new_start
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.tasks import Draw, held_out_prompts, training_prompts
from asyncrl.tasks.pretraining_texts import write_texts
from asyncrl.tasks.prompt_check import write_longest
from asyncrl.tasks.sources import Rows
from asyncrl.telemetry.display import Display
from asyncrl.telemetry.jsonl import read_lines
from asyncrl.telemetry.run_directory import RunDirectory, replace_text

LONGEST = "longest_prompts.jsonl"
"""File in the run's logs with the prompts whose tokens are counted before anything is trained."""

PRETRAIN = "pretrain.jsonl"
"""File in the run's logs with the texts that the trainer learns besides its samples."""

HEARTBEAT = 10.0
"""Seconds between heartbeats. Three missing ones mean that a worker's host is gone; loading a model takes less."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run that the user requests.

    command: command that resumes the run. prompts, algorithm: Python objects that replace those of the config.
    services: specs by name that replace those of the config, e.g. rewards in this process. forks: process that workers
    are forked from, if it was started already.
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


def nothing_left(request: RunRequest, directory: RunDirectory, plan: ResumePlan | None) -> bool:
    """Returns, and prints, whether all steps are trained and the last version is evaluated if the config wants it."""
    config = request.config
    if plan is None or plan.version < config.steps:
        return False
    evaluated = {line["version"] for line in read_lines(directory.evaluations)} if config.evaluate.prompts else set()
    if config.evaluate.prompts and plan.version not in evaluated:
        return False
    beyond = f", beyond the {config.steps} asked for" if plan.version > config.steps else ""
    for line in (*plan.said, f"already done at step {plan.version}{beyond}; nothing to do (raise steps to go on)"):
        request.display.say(line)
    return True


def settle_config(request: RunRequest, directory: RunDirectory, store: FileStore, plan: ResumePlan | None) -> None:
    """Refuses a changed config, prints what a resume takes over, and writes config.toml."""
    if plan is None:
        _remove_other_model(request.config, directory)
    else:
        changes = check_resume(directory.path, request.config, request.accept_changes)
        for line in (*plan.said, *(f"changed: {change}" for change in changes)):
            request.display.say(line)
        repeated = _repeated_steps(store, plan)
        request.display.say(
            f"resuming {directory.path} at step {plan.version} of {request.config.steps}{repeated}: "
            f"model, optimizer and journal are taken over, {len(plan.groups)} groups in flight start again"
        )
    replace_text(directory.config, dump(request.config))


def _repeated_steps(store: FileStore, plan: ResumePlan) -> str:
    """Returns which steps were trained after the checkpoint and are trained again."""
    beyond = (framed.record for framed in surviving(store) if framed.start >= plan.offset)
    last = max((record.version for record in beyond if isinstance(record, Trained)), default=plan.version)
    if last == plan.version:
        return ""
    steps = f"steps {plan.version + 1} to {last} are" if last > plan.version + 1 else f"step {last} is"
    return f"; {steps} done again"


def _remove_other_model(config: Config, directory: RunDirectory) -> None:
    """Removes a model that an earlier start made of another config."""
    if directory.config.exists():
        then = read(directory.config)
        if (then.model.name, then.seed) != (config.model.name, config.seed):
            shutil.rmtree(directory.model, ignore_errors=True)


def load_questions(request: RunRequest, directory: RunDirectory) -> Questions:
    """Reads all prompts; raises TaskError for mistakes in them."""
    config = request.config
    prompts, held_out = training_prompts(config, request.prompts), held_out_prompts(config)
    questions = held_out.first(config.evaluate.size) if held_out is not None else []
    source = config.task.prompts if request.prompts is None else "the rows given as prompts"
    held_out_source = {f"evaluate.prompts: {config.evaluate.prompts}": held_out} if held_out is not None else {}
    if config.task.pretrain:
        write_texts(directory.logs / PRETRAIN, config.task)
    write_longest(directory.logs / LONGEST, {f"task.prompts: {source}": prompts, **held_out_source})
    return Questions(Draw(prompts, config.seed), questions, f"task.prompts: {source}", len(prompts))


def restore_run(config: Config, directory: RunDirectory, store: FileStore, plan: ResumePlan | None) -> RunState:
    """Makes a new gate and journal, or restores those of the checkpoint in `plan`."""
    gate_config = GateConfig.of(config)
    if plan is None:
        return RunState(directory, store, Journal(store), Gate(gate_config), None)
    journal = resume(store, plan)
    gate = Gate(gate_config, plan.version, plan.next_group)
    for group in plan.groups:
        gate.restore(group)
    return RunState(directory, store, journal, gate, plan, plan.incarnation)


def facts_of(config: Config, directory: RunDirectory, model: Path, run_state: RunState) -> RunFacts:
    run, incarnation = new_start(directory), run_state.incarnation
    keys = CurveKeys.fresh()
    return RunFacts(
        run=run,
        run_dir=str(directory.path),
        model_dir=str(model.absolute()),
        incarnation=incarnation,
        weights_arena=f"asyncrl-{run}-{incarnation}-weights",
        config=config,
        checkpoint_dir=run_state.plan.directory if run_state.plan else None,
        curve=(keys.public, keys.secret),
        heartbeat=HEARTBEAT if config.fleet.wire == "tcp" else None,
    )
