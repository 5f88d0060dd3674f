"""Evaluates a run's newest checkpoint, or any model, with a fleet that has no trainer: on held-out prompts, or in
episodes of a policy that acts."""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asyncrl.config.install_hints import missing_packages
from asyncrl.config.problems import Problem, refuse
from asyncrl.config.schema import Config, Scorer
from asyncrl.config.section_rules import model_problems
from asyncrl.config.sections.runtime_config import FeedbackConfig
from asyncrl.config.sources import load, read
from asyncrl.config.user_code import suggestion
from asyncrl.controller.journal.checkpoints import chosen_model
from asyncrl.controller.observers.evaluation import EpisodeEvaluator, Evaluation, Evaluator, Question, SaveResults
from asyncrl.deploy.preflight import missing_devices, scoring_problems
from asyncrl.deploy.process.fork_client import forks_of
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.deploy.service_specs import acting_evaluation_spec, environment_spec, generation_spec, reward_spec
from asyncrl.engines.acting.stepping.spaces import SPACES
from asyncrl.engines.models.model_families import family_problems
from asyncrl.engines.models.model_folder import base_folder, exported_version, is_in_parts, refuse_other_base
from asyncrl.engines.models.model_preparation import at_noted_commits, prepare
from asyncrl.engines.models.scoring_models import scoring_model_folder
from asyncrl.engines.ranks.rank_limits import rank_problems
from asyncrl.errors import ConfigError
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.protocols.service_contracts import Environment, Generation, Reward
from asyncrl.tasks import held_out_prompts
from asyncrl.tasks.row_files import Rows
from asyncrl.telemetry.run_directory import RunDirectory, missing_run

NO_SERVICES: Mapping[str, ServiceSpec] = MappingProxyType({})
EVALUATING = ("generation", "reward", "cost")
"""Services of an evaluation that may have a device."""
EPISODES = 10
"""Episodes of a policy that acts, where neither a number is asked for nor the config has one."""
VERSION = 0
"""Version of the weights for the workers of an evaluation, which no trainer counts for them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Describes an evaluation. prompts: in place of those of the config, all of them. size: most prompts, or number of
    episodes; 0: as the config says. sets: names of held-out sets; none: all that there are. step: as in `chosen_model`.
    save: takes the answers of each set."""

    prompts: str | Rows | None = None
    size: int = 0
    sets: tuple[str, ...] = ()
    step: str = ""
    save: SaveResults | None = None


ALL = Wanted()


async def evaluate_run(
    run_dir: Path,
    config: Config | None = None,
    wanted: Wanted = ALL,
    services: Mapping[str, ServiceSpec] = NO_SERVICES,
) -> list[Evaluation]:
    """Evaluates a checkpoint of a run with its rewards; returns one result for each set. services: replace those of the
    config."""
    if not RunDirectory(run_dir).started_before:
        raise missing_run(run_dir, "is no run directory: it has no config.toml")
    saved, version = chosen_model(run_dir, wanted.step)
    if is_in_parts(saved):
        from asyncrl.engines.models.tensor_parts import gather_model  # Imports torch.

        with tempfile.TemporaryDirectory(prefix="asyncrl-model-") as scratch:
            whole = Path(scratch) / "model"
            await asyncio.to_thread(gather_model, saved, whole)
            return await _evaluate_saved(run_dir, (whole, version), config, wanted, services)
    return await _evaluate_saved(run_dir, (saved, version), config, wanted, services)


async def _evaluate_saved(
    run_dir: Path,
    chosen: tuple[Path, int],
    config: Config | None,
    wanted: Wanted,
    services: Mapping[str, ServiceSpec],
) -> list[Evaluation]:
    """Evaluates a model that is a folder."""
    saved, version = chosen
    own = read(RunDirectory(run_dir).config)
    config = config or own
    if config.acting.env:
        return [replace(await _evaluate_acting(saved, config, wanted), version=version)]
    config = _changed(config, "model", lora=own.model.lora)
    refuse([problem for problem in model_problems(config) if not problem.is_warning])
    model = saved
    adapters = None
    if own.model.lora is not None:
        model = base_folder(run_dir, own)
        adapters = saved
        await asyncio.to_thread(refuse_other_base, saved.parent, model)
    if not config.is_scored and "reward" not in services:
        raise ConfigError(
            f"the rewards of {run_dir} are functions of the Python process that trained it: evaluate there, with "
            "`run.evaluate()`, or name an experiment with --task"
        )
    config = await asyncio.to_thread(_with_noted_scorers, config, RunDirectory(run_dir).hub)
    config, questions = _questions(config, wanted)
    found = await evaluate_model(model, config, questions, services, adapters, wanted.save)
    return [replace(each, version=version) for each in found]


def _with_noted_scorers(config: Config, noted: Path) -> Config:
    """Returns the config with the commits of reward and cost models that a run has noted, in place of their names."""
    names = {f"{service}.model": section.model for service, section in config.scorers.items()}
    found = at_noted_commits(names, noted)
    for service in config.scorers:
        if (model := found.get(f"{service}.model")) is not None:
            config = _changed(config, service, model=model)
    return config


def _questions(config: Config, wanted: Wanted) -> tuple[Config, dict[str, list[Question]]]:
    """Returns the held-out prompts of each set, and the config with their numbers; raises ConfigError without any."""
    if wanted.prompts is not None:
        name, *more = wanted.sets or ("",)
        found = held_out_prompts(config, wanted.prompts, name)
        assert found is not None, "there is a source"
        if more or name:
            raise ConfigError("the prompts that are given stand for those of [evaluate]: name no set beside them")
        size = min(len(found), wanted.size or len(found))
        return _changed(config, "evaluate", size=size), {name: found.first(size)}
    known = {each.name: each for each in config.evaluate.held_out}
    if not known:
        text = "there are no held-out prompts: set evaluate.prompts, name a task with --task, or prompts with --prompts"
        raise ConfigError(text)
    for name in wanted.sets:
        if name not in known:
            raise ConfigError(f"there is no held-out set {name}{suggestion(name, filter(None, known))}")
    read = {name: held_out_prompts(config, name=name) for name in wanted.sets or known}
    sizes = {name: min(known[name].size, wanted.size or known[name].size) for name in read}
    return config, {name: prompts.first(sizes[name]) for name, prompts in read.items() if prompts is not None}


async def _evaluate_acting(policy: Path, config: Config, wanted: Wanted) -> Evaluation:
    """Plays episodes with the policy in a folder."""
    if wanted.prompts is not None or wanted.sets:
        raise ConfigError("a policy that acts is evaluated in episodes: leave out prompts and sets")
    if not (policy / SPACES).is_file():
        raise ConfigError(f"{policy} holds no policy that acts: it has no {SPACES}")
    episodes = wanted.size or config.evaluate.episodes or EPISODES
    config = _changed(config, "evaluate", episodes=episodes)
    refuse(missing_packages(config))
    async with scoring_fleet(policy, config) as running:
        evaluator = EpisodeEvaluator(running.handle("evaluation", Generation), config, wanted.save)
        return await evaluator.evaluate(VERSION, 0)


def _changed(config: Config, section: str, **values: Any) -> Config:
    """Returns the config with other values of keys of a section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


async def evaluate_target(
    target: str, task: str | None, say: Callable[[str], None], wanted: Wanted = ALL
) -> list[Evaluation]:
    """Evaluates a target, which is a run directory or a form of `model.name`. task: experiment with the held-out
    prompts and rewards. say: gets one line of progress at a time."""
    config = load(task).config if task is not None else None
    if RunDirectory(Path(target)).started_before:
        return await evaluate_run(Path(target), config, wanted)
    if config is None:
        raise ConfigError(f"{target} is no run directory; to evaluate a model name an experiment with --task")
    if wanted.step:
        raise ConfigError(f"{target} is no run directory, so it has no checkpoints: leave out --step")
    if config.acting.env:
        return [replace(await _evaluate_acting(Path(target), config, wanted), version=exported_version(Path(target)))]
    config, questions = _questions(config, wanted)
    config = _changed(config, "model", name=target, lora=None)
    refuse(missing_packages(config))
    with tempfile.TemporaryDirectory(prefix="asyncrl-model-") as scratch:
        model = await prepare(config, Path(scratch) / "model", say)
        version = exported_version(model)
        found = await evaluate_model(model, config, questions, save=wanted.save)
        return [replace(each, version=version) for each in found]


def _problems(config: Config, model: Path, services: Mapping[str, ServiceSpec]) -> list[Problem]:
    """Returns the problems of rewards, family and devices."""
    rewarded = [] if config.acting.env else list(scoring_problems(config, services))
    found = [*rewarded, *family_problems(config, model)]
    return [*found, *missing_devices(config, EVALUATING)]


async def evaluate_model(
    model: Path,
    config: Config,
    questions: Mapping[str, list[Question]],
    services: Mapping[str, ServiceSpec] = NO_SERVICES,
    adapters: Path | None = None,
    save: SaveResults | None = None,
) -> list[Evaluation]:
    """Evaluates a model folder with workers of its own, or with `services`: generation, reward and, if any, cost.
    questions: by set. adapters: folder of those that the model has in a run with `model.lora`. save: as in Wanted."""
    async with scoring_fleet(model, config, services, adapters) as running:
        generation = running.handle("evaluation", Generation)
        scorers = {name: running.handle(name, Reward) for name in config.scorers}
        environment = running.handle("environment", Environment) if config.environment.use else None
        reward = scorers["reward"]
        cost = scorers.get("cost")
        evaluators = [
            Evaluator(generation, reward, own, config, cost, environment, name, save) for name, own in questions.items()
        ]
        return [await each.evaluate(VERSION, 0) for each in evaluators]


@asynccontextmanager
async def scoring_fleet(
    model: Path,
    config: Config,
    services: Mapping[str, ServiceSpec] = NO_SERVICES,
    adapters: Path | None = None,
) -> AsyncIterator[RunningFleet]:
    """Runs workers that sample a model and score what it wrote, as `evaluate_model` describes."""
    config = config.model_copy(update={"feedback": FeedbackConfig()})  # Nobody is asked about held-out answers.
    refuse(await asyncio.to_thread(_problems, config, model, services))
    model = await asyncio.to_thread(model.absolute)
    specs = await asyncio.to_thread(_specs, config, model, services, adapters)
    with tempfile.TemporaryDirectory(prefix="asyncrl-evaluate-") as scratch:
        (Path(scratch) / "logs").mkdir()
        keys = CurveKeys.fresh()
        facts = RunFacts(
            run=secrets.token_hex(4),
            run_dir=Path(scratch),
            model_dir=model,
            incarnation=0,
            weights_arena="",
            config=_changed(config, "fleet", wire="ipc"),
            curve=(keys.public, keys.secret),
        )
        with forks_of(config) as forks, LocalLauncher(facts.run, forks=forks) as launcher:
            async with running_fleet(specs, facts, launcher=launcher) as running:
                yield running


def _specs(
    config: Config, model: Path, services: Mapping[str, ServiceSpec], adapters: Path | None
) -> list[ServiceSpec]:
    """Returns the services of an evaluation."""
    if config.acting.env:
        return [acting_evaluation_spec(own_version=VERSION)]
    plays = [environment_spec(config)] if config.environment.use else []
    scorers = [services.get(name) or _scorer_spec(config, name, model) for name in config.scorers]
    return [_policy_spec(config, adapters), *plays, *scorers]


def _policy_spec(config: Config, adapters: Path | None) -> ServiceSpec:
    options: dict[str, Any] = {"own_version": VERSION}
    if adapters is not None:
        options["adapters"] = str(adapters.absolute())
    return generation_spec(config, "evaluation", replicas=config.evaluate.replicas, options=options)


def _scorer_spec(config: Config, service: Scorer, policy: Path) -> ServiceSpec:
    """Returns the spec of a scoring service; raises ConfigError when its model does not fit this policy."""
    spec = reward_spec(config, service)
    model = config.scorers[service].model
    if not model:
        return spec
    folder = str(scoring_model_folder(config, model, f"{service}.model", policy))
    refuse(rank_problems(config, {service: folder}))
    return replace(spec, options={"model": folder})
