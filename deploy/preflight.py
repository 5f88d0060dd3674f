"""Finds everything that is wrong with a run before it starts. `asyncrl run` refuses it, `asyncrl doctor` prints it."""

from collections.abc import Collection, Iterator
from pathlib import Path

from asyncrl.algorithms.select import algorithm_problems
from asyncrl.config.install_hints import missing_packages
from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.controller.algorithm import Algorithm
from asyncrl.deploy.checks.memory_needs import memory_problems
from asyncrl.deploy.checks.resource_limits import descriptor_problems
from asyncrl.deploy.service_specs import worker_count
from asyncrl.engines.models.folder_checks import context_problems, damages
from asyncrl.rewards.functions import function_problems
from asyncrl.telemetry.sinks import sink_problems


def preflight(
    config: Config, *, algorithm: Algorithm | None = None, served: Collection[str] = (), model_is_made: bool = False
) -> Iterator[Problem]:
    """Yields every problem of a run that is known without running the user's code, warnings among them.

    algorithm: given as an object instead of `algorithm.custom`. served: names of services that the caller brings.
    model_is_made: the run directory has the model already.
    """
    yield from config.warnings
    yield from descriptor_problems(worker_count(config))
    damaged = [] if model_is_made else list(_damages(config))
    yield from damaged or model_problems(config, Path(config.model.name).expanduser())
    yield from sink_problems(config.telemetry.sinks)
    yield from scoring_problems(config, served)
    yield from algorithm_problems(config, algorithm)
    yield from missing_packages(config, model_is_made=model_is_made)


def scoring_problems(config: Config, served: Collection[str] = ()) -> Iterator[Problem]:
    """Yields the problems of reward and cost functions."""
    for service in config.scorers:
        if service not in served:
            yield from function_problems(config, service)


def model_problems(config: Config, model: Path) -> Iterator[Problem]:
    """Yields the problems of memory and context window; a model that is not on this machine has none yet."""
    yield from memory_problems(config, str(model))
    yield from context_problems(config, model)


def _damages(config: Config) -> Iterator[Problem]:
    """Yields a problem for each file of a model folder that is incomplete."""
    scorers = ("critic", "reward", "cost", "cost_critic")
    names = {"model.name": config.model.name} | {f"{name}.model": getattr(config, name).model for name in scorers}
    for key, name in names.items():
        for damage in damages(Path(name).expanduser()) if name else ():
            yield Problem(key, "", f"{damage}; copy or download the model once more")
