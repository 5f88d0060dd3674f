"""Scores a model on held-out prompts without a trainer: a run's newest checkpoint, or any model."""

import asyncio
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from asyncrl.config.missing_packages import missing_packages
from asyncrl.config.problems import refuse
from asyncrl.config.schema import Config
from asyncrl.config.sources import load, read
from asyncrl.controller.journal.checkpoints import plan_resume
from asyncrl.controller.journal.journal_store import FileStore
from asyncrl.controller.observers.evaluation import Evaluation, Evaluator, Question
from asyncrl.deploy.preflight import scoring_problems
from asyncrl.deploy.process.fork_client import forks_of
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.deploy.service_specs import generation_spec, reward_spec
from asyncrl.engines.models.folder_checks import scoring_model_folder
from asyncrl.engines.models.model_folder import prepare
from asyncrl.errors import ConfigError
from asyncrl.fleet.fleet import ServiceSpec, running_fleet
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.protocols.contracts import Generation, Reward
from asyncrl.rewards.functions import Scorer, section_of
from asyncrl.tasks import held_out_prompts
from asyncrl.tasks.sources import Rows
from asyncrl.telemetry.run_directory import RunDirectory

NO_SERVICES: Mapping[str, ServiceSpec] = MappingProxyType({})
VERSION = 0
"""Version of the weights in a model folder, which no trainer counts."""


def newest_model(run_dir: Path) -> tuple[Path, int]:
    """Returns `model/` of a run's newest good checkpoint and its version; raises ConfigError when there is none."""
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
    """Evaluates the newest checkpoint of a run with the run's rewards.

    prompts: default: those of the section `evaluate`. services: used instead of those of the config.
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
    """Returns the given held-out prompts, or those of the section `evaluate`; raises ConfigError without any."""
    found = held_out_prompts(config, given)
    if found is None:
        raise ConfigError("there are no held-out prompts: set evaluate.prompts, or name a task with --task")
    return found.first(config.evaluate.size)


async def evaluate_target(target: str, task: str | None, say: Callable[[str], None]) -> Evaluation:
    """Evaluates a run directory or a model.

    target: a run directory, or a form of `model.name`. task: experiment with the held-out prompts and rewards. say:
    gets one line of progress at a time.
    """
    config = load(task).config if task is not None else None
    path = Path(target)
    if RunDirectory(path).started_before:
        return await evaluate_run(path, config)
    if config is None:
        raise ConfigError(f"{target} is no run directory; to evaluate a model name an experiment with --task")
    questions = questions_of(config)
    named = config.model_copy(update={"model": config.model.model_copy(update={"name": target})})
    refuse(missing_packages(named))
    with tempfile.TemporaryDirectory(prefix="asyncrl-model-") as scratch:
        return await evaluate_model(await prepare(named, Path(scratch) / "model", say), named, questions)


async def evaluate_model(
    model: Path, config: Config, questions: list[Question], services: Mapping[str, ServiceSpec] = NO_SERVICES
) -> Evaluation:
    """Evaluates a model folder with a generation worker and a reward worker of its own, or with `services`.

    A cost worker joins them when the algorithm has costs.
    """
    refuse(scoring_problems(config, services))
    costs = config.algorithm.constraint == "lagrangian"
    model_dir = await asyncio.to_thread(os.path.abspath, model)
    with tempfile.TemporaryDirectory(prefix="asyncrl-evaluate-") as scratch:
        (Path(scratch) / "logs").mkdir()
        keys = CurveKeys.fresh()
        facts = RunFacts(
            run=secrets.token_hex(4),
            run_dir=scratch,
            model_dir=model_dir,
            incarnation=0,
            weights_arena="",
            config=config.model_copy(update={"fleet": config.fleet.model_copy(update={"wire": "ipc"})}),
            curve=(keys.public, keys.secret),
        )
        specs = [
            generation_spec(config, "evaluation", options={"own_version": VERSION}),
            services["reward"]
            if "reward" in services
            else await asyncio.to_thread(_scorer_spec, config, "reward", model_dir),
        ]
        if costs:
            specs.append(await asyncio.to_thread(_scorer_spec, config, "cost", model_dir))
        with forks_of(config) as forks, LocalLauncher(facts.run, forks=forks) as launcher:
            async with running_fleet(specs, facts, launcher=launcher) as running:
                generation, reward = running.handle("evaluation", Generation), running.handle("reward", Reward)
                cost = running.handle("cost", Reward) if costs else None
                return await Evaluator(generation, reward, questions, config, cost).evaluate(VERSION, 0)


def _scorer_spec(config: Config, service: Scorer, policy: str) -> ServiceSpec:
    """Returns the spec of a scoring service; raises ConfigError when its model does not fit this policy."""
    spec, model = reward_spec(config, service), section_of(config, service).model
    if not model:
        return spec
    return replace(spec, options={"model": str(scoring_model_folder(config, model, f"{service}.model", Path(policy)))})
