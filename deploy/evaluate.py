"""Scores a model on held-out prompts, without a trainer: a run's newest checkpoint, or any model."""

import asyncio
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from asyncrl.checkpoint import plan_resume
from asyncrl.config import Config
from asyncrl.deploy.local import LocalLauncher
from asyncrl.deploy.services import GENERATION, reward_spec
from asyncrl.errors import ConfigError
from asyncrl.evaluation import Evaluation, Evaluator, Question
from asyncrl.fleet import ServiceSpec, running_fleet
from asyncrl.launch import RunFacts
from asyncrl.models import judge_folder, prepare
from asyncrl.parts import missing_parts
from asyncrl.protocols.contracts import Generation, Reward
from asyncrl.rewards.functions import Judge, check_functions, section_of
from asyncrl.rundir import RunDirectory
from asyncrl.settings import load, read
from asyncrl.store import FileStore
from asyncrl.tasks import held_out_prompts
from asyncrl.tasks.sources import Rows
from asyncrl.wire.auth import CurveKeys

NO_SERVICES: Mapping[str, ServiceSpec] = MappingProxyType({})
VERSION = 0
"""Of the weights in the model folder, which no trainer counts."""


def newest_model(run_dir: Path) -> tuple[Path, int]:
    """`model/` of a run's newest good checkpoint, and its version. Raises ConfigError when there is none."""
    plan = None
    if (run_dir / "journal").is_file():
        with closing(FileStore(run_dir, writable=False)) as store:
            plan = plan_resume(store)
    if plan is None:
        raise ConfigError(f"{run_dir} has no checkpoint yet")
    return Path(plan.directory) / "model", plan.version


async def evaluate_run(
    run_dir: Path,
    config: Config | None = None,
    prompts: str | Rows | None = None,
    services: Mapping[str, ServiceSpec] = NO_SERVICES,
) -> Evaluation:
    """The newest checkpoint of a run, with the run's rewards.

    prompts: by default those of the section `evaluate`. services: used instead of those the config asks for.
    """
    if not RunDirectory(run_dir).started_before:
        raise ConfigError(f"{run_dir} is no run directory: it has no config.toml")
    model, version = newest_model(run_dir)
    config = config or read(RunDirectory(run_dir).config)
    if not (config.reward.functions or config.reward.model) and "reward" not in services:
        raise ConfigError(
            f"the rewards of {run_dir} are functions of the Python process that trained it: evaluate there, with "
            "`run.evaluate()`, or name an experiment with --task"
        )
    if isinstance(prompts, str):
        config = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"prompts": prompts})})
    given = None if isinstance(prompts, str) else prompts
    evaluation = await evaluate_model(model, config, questions_of(config, given), services)
    return replace(evaluation, version=version)


def questions_of(config: Config, given: Rows | None = None) -> list[Question]:
    """Held-out prompts given, or those of section `evaluate`. Raises ConfigError when there are none."""
    found = held_out_prompts(config, given)
    if found is None:
        raise ConfigError("there are no held-out prompts: set evaluate.prompts, or name a task with --task")
    return found.first(config.evaluate.size)


async def evaluate_target(target: str, task: str | None, say: Callable[[str], None]) -> Evaluation:
    """`asyncrl evaluate RUN_DIR|MODEL --task T`. MODEL: what `model.name` takes. task: an experiment, whose held-out
    prompts and rewards are used. say: receives one line of progress at a time."""
    config = load(task).config if task is not None else None
    path = Path(target)
    if RunDirectory(path).started_before:
        return await evaluate_run(path, config)
    if config is None:
        raise ConfigError(f"{target} is no run directory; to evaluate a model name an experiment with --task")
    questions = questions_of(config)
    named = config.model_copy(update={"model": config.model.model_copy(update={"name": target})})
    if missing := missing_parts(named):
        raise ConfigError("\n".join(missing))
    with tempfile.TemporaryDirectory(prefix="asyncrl-model-") as scratch:
        return await evaluate_model(await prepare(named, Path(scratch) / "model", say), named, questions)


async def evaluate_model(
    model: Path, config: Config, questions: list[Question], services: Mapping[str, ServiceSpec] = NO_SERVICES
) -> Evaluation:
    """A model folder, sampled by a generation worker of its own and scored by a reward worker, or by `services`, and by
    a cost worker where the algorithm has costs."""
    mistakes = [] if "reward" in services else check_functions(config)
    mistakes += check_functions(config, "cost")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    costs = config.algorithm.constraint == "lagrangian"
    model_dir = await asyncio.to_thread(os.path.abspath, model)
    with tempfile.TemporaryDirectory(prefix="asyncrl-evaluate-") as scratch:
        (Path(scratch) / "logs").mkdir()
        keys = CurveKeys.fresh()
        facts = RunFacts(
            run=secrets.token_hex(4),
            run_dir=scratch,
            model_dir=model_dir,
            epoch=0,
            weights_arena="",
            config=config.model_copy(update={"fleet": config.fleet.model_copy(update={"wire": "ipc"})}),
            curve=(keys.public, keys.secret),
        )
        specs = [
            ServiceSpec("evaluation", Generation, GENERATION, options={"own_version": VERSION}),
            services["reward"]
            if "reward" in services
            else await asyncio.to_thread(_judge, config, "reward", model_dir),
        ]
        if costs:
            specs.append(await asyncio.to_thread(_judge, config, "cost", model_dir))
        with LocalLauncher(facts.run) as launcher:
            async with running_fleet(specs, facts, launcher=launcher) as running:
                generation, reward = running.handle("evaluation", Generation), running.handle("reward", Reward)
                cost = running.handle("cost", Reward) if costs else None
                return await Evaluator(generation, reward, questions, config, cost).evaluate(VERSION, 0)


def _judge(config: Config, service: Judge, policy: str) -> ServiceSpec:
    """Raises ConfigError when the model that judges is none for this policy."""
    spec, model = reward_spec(config, service), section_of(config, service).model
    if not model:
        return spec
    return replace(spec, options={"model": str(judge_folder(config, model, f"{service}.model", Path(policy)))})
