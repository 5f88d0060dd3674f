"""What a run begins with: the order, its config and prompts, and the state it takes up from an earlier start."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.checkpoint import ResumePlan, resume
from asyncrl.config import Config
from asyncrl.controller import Page
from asyncrl.evaluation import Question
from asyncrl.fleet import ServiceSpec
from asyncrl.launch import RunFacts
from asyncrl.ledger import Journal, surviving
from asyncrl.leftovers import new_start
from asyncrl.prompt_lengths import write_longest
from asyncrl.records import Trained
from asyncrl.rundir import RunDirectory, replace_text
from asyncrl.settings import read
from asyncrl.settings.changes import check_resume
from asyncrl.settings.toml import dump
from asyncrl.staleness import Gate, GateConfig
from asyncrl.store import FileStore
from asyncrl.tasks import Draw, held_out_prompts, training_prompts
from asyncrl.tasks.draw import drawn_row
from asyncrl.tasks.pretraining import write_texts
from asyncrl.tasks.sources import Rows
from asyncrl.telemetry.display import Display
from asyncrl.telemetry.lines import read_lines
from asyncrl.wire.auth import CurveKeys

LONGEST = "longest_prompts.jsonl"
"""In the run's logs: the prompts whose tokens are counted before anything is trained."""

PRETRAIN = "pretrain.jsonl"
"""Beside it: the texts that the trainer learns beside its samples, where there are any."""

HEARTBEAT = 10.0
"""Seconds. A worker whose host is gone is noticed after three; loading a model must not silence its loop as long."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to run.

    command: what the user types to resume. prompts, page: given from Python instead of what the config names.
    services: by name, used instead of those that the config asks for: rewards served in this process, stand-ins.
    """

    config: Config
    run_dir: Path
    display: Display
    command: str
    accept_changes: bool = False
    prompts: Rows | None = None
    page: Page | None = None
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Questions:
    """training: by group id; held_out: empty without evaluation; source: what messages call the training rows."""

    training: Draw
    held_out: Sequence[Question]
    source: str
    rows: int

    def where(self, group: int, seed: int) -> str:
        """The row of a group, for messages."""
        return f"{self.source}, row {drawn_row(seed, group, self.rows)}"


@dataclass(slots=True)
class TakenUp:
    """The state a run starts from. plan: None at the first start."""

    directory: RunDirectory
    store: FileStore
    journal: Journal
    gate: Gate
    plan: ResumePlan | None
    epoch: int = field(default=0)


def nothing_left(order: Order, directory: RunDirectory, plan: ResumePlan | None) -> bool:
    """Whether all steps are trained and the last version is evaluated, where that is asked for; says so."""
    config = order.config
    if plan is None or plan.version < config.steps:
        return False
    evaluated = {line["version"] for line in read_lines(directory.evaluations)} if config.evaluate.prompts else set()
    if config.evaluate.prompts and plan.version not in evaluated:
        return False
    beyond = f", beyond the {config.steps} asked for" if plan.version > config.steps else ""
    for line in (*plan.said, f"already done at step {plan.version}{beyond}; nothing to do (raise steps to go on)"):
        order.display.say(line)
    return True


def settle_config(order: Order, directory: RunDirectory, store: FileStore, plan: ResumePlan | None) -> None:
    """Refuse a changed config, say what a resume takes over, and write down what is used."""
    if plan is None:
        _forget_another_model(order.config, directory)
    else:
        changes = check_resume(directory.path, order.config, order.accept_changes)
        for line in (*plan.said, *(f"changed: {change}" for change in changes)):
            order.display.say(line)
        order.display.say(
            f"resuming {directory.path} at step {plan.version} of {order.config.steps}{_again(store, plan)}: "
            f"model, optimizer and journal are taken over, {len(plan.groups)} groups in flight start again"
        )
    replace_text(directory.config, dump(order.config))


def _again(store: FileStore, plan: ResumePlan) -> str:
    """Steps that were trained beyond the checkpoint. Records there may be anything: nothing is rebuilt from them."""
    beyond = (framed.record for framed in surviving(store) if framed.start >= plan.offset)
    last = max((record.version for record in beyond if isinstance(record, Trained)), default=plan.version)
    if last == plan.version:
        return ""
    steps = f"steps {plan.version + 1} to {last} are" if last > plan.version + 1 else f"step {last} is"
    return f"; {steps} done again"


def _forget_another_model(config: Config, directory: RunDirectory) -> None:
    """A start that came to nothing may have made a model which this config does not mean."""
    if directory.config.exists():
        then = read(directory.config)
        if (then.model.name, then.seed) != (config.model.name, config.seed):
            shutil.rmtree(directory.model, ignore_errors=True)


def load_questions(order: Order, directory: RunDirectory) -> Questions:
    config = order.config
    prompts, held_out = training_prompts(config, order.prompts), held_out_prompts(config)
    questions = held_out.first(config.evaluate.size) if held_out is not None else []
    source = config.task.prompts if order.prompts is None else "the rows given as prompts"
    held_out_source = {f"evaluate.prompts: {config.evaluate.prompts}": held_out} if held_out is not None else {}
    if config.task.pretrain:
        write_texts(directory.logs / PRETRAIN, config.task)
    write_longest(directory.logs / LONGEST, {f"task.prompts: {source}": prompts, **held_out_source})
    return Questions(Draw(prompts, config.seed), questions, f"task.prompts: {source}", len(prompts))


def take_up(config: Config, directory: RunDirectory, store: FileStore, plan: ResumePlan | None) -> TakenUp:
    gate_config = GateConfig.of(config)
    if plan is None:
        return TakenUp(directory, store, Journal(store), Gate(gate_config), None)
    journal = resume(store, plan)
    gate = Gate(gate_config, plan.version, plan.next_group)
    for group in plan.groups:
        gate.restore(group)
    return TakenUp(directory, store, journal, gate, plan, plan.epoch)


def facts_of(config: Config, directory: RunDirectory, model: Path, taken_up: TakenUp) -> RunFacts:
    run, epoch = new_start(directory), taken_up.epoch
    keys = CurveKeys.fresh()
    return RunFacts(
        run=run,
        run_dir=str(directory.path),
        model_dir=str(model.absolute()),
        epoch=epoch,
        weights_arena=f"asyncrl-{run}-{epoch}-weights",
        config=config,
        checkpoint_dir=taken_up.plan.directory if taken_up.plan else None,
        curve=(keys.public, keys.secret),
        heartbeat=HEARTBEAT if config.fleet.wire == "tcp" else None,
    )
