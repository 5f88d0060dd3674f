"""Selects the algorithm and the estimator of advantages that a config asks for: one of asyncrl or the user's own."""

import inspect
import os
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from asyncrl.algorithms import acting, grpo, ppo, remax, safe_rlhf
from asyncrl.config.problems import Problem
from asyncrl.config.schema import AlgorithmConfig, Config
from asyncrl.config.sections.algorithm_config import PRESETS
from asyncrl.config.user_code import module_named, resolve
from asyncrl.controller.controller import Algorithm
from asyncrl.errors import ConfigError
from asyncrl.objectives import advantages
from asyncrl.objectives.advantages import Advantages

SHIPPED = {"grpo": grpo.ALGORITHM, "remax": remax.ALGORITHM, "ppo": ppo.ALGORITHM, "safe_rlhf": safe_rlhf.ALGORITHM}
MADE_FOR = {
    "grpo": "advantages without a critic or a greedy answer",
    "remax": 'advantage = "greedy"',
    "ppo": 'advantage = "gae" without a constraint',
    "safe_rlhf": 'constraint = "lagrangian"',
}
MODELS = {"grpo": 1, "remax": 1, "ppo": 2, "safe_rlhf": 3}
"""Number of models that the `train` of each algorithm updates; it also runs where there are more."""
KEY = "algorithm.custom"
FROM_PYTHON = "python:algorithm"
"""Value of `algorithm.custom` in the config of a run whose algorithm cannot be imported by a name."""

ARGUMENTS = {"roll_out": ("fleet", "control", "group"), "train": ("fleet", "control")}
"""Arguments that each function of an algorithm is called with."""


def algorithm_of(config: Config) -> Algorithm:
    """Returns the algorithm to run, GRPO where a config needs no other service or row; raises as `algorithm_named`."""
    if config.algorithm.custom:
        return replace(algorithm_named(config.algorithm.custom), name=config.algorithm.custom)
    if config.acting.env:
        return acting.ALGORITHM
    name = _shipped(config.algorithm)
    if name in SHIPPED:
        return SHIPPED[name]
    return algorithm_from(import_module(f"asyncrl.algorithms.{name}"), f"asyncrl.algorithms.{name}")


def _shipped(algorithm: AlgorithmConfig) -> str:
    """Returns the name of the algorithm of asyncrl that fits this section: the file of the preset's name, if there is
    one that no other key chooses."""
    if algorithm.preset not in SHIPPED and find_spec(f"asyncrl.algorithms.{algorithm.preset}") is not None:
        return algorithm.preset
    if algorithm.constraint == "lagrangian":
        return "safe_rlhf"
    return {"gae": "ppo", "greedy": "remax"}.get(algorithm.advantage, "grpo")


def algorithm_problems(config: Config, given: Algorithm | None = None) -> list[Problem]:
    """Returns why `algorithm.custom`, or the algorithm that was given as an object, cannot run."""
    if not config.algorithm.custom:
        return []
    try:
        algorithm = given or algorithm_of(config)
    except ConfigError as error:
        where, _, text = str(error).partition(": ")
        return [Problem("algorithm.custom", where, text)]
    runs = _shipped(config.algorithm)
    found = []
    trainable = {name for name in SHIPPED if MODELS[name] <= MODELS.get(runs, 1)}
    for function, names in (("roll_out", {runs}), ("train", trainable)):
        its = getattr(algorithm, function)
        name = next((name for name, shipped in SHIPPED.items() if getattr(shipped, function) is its), None)
        if name is not None and name not in names:
            why = (
                f"its {function} is that of asyncrl.algorithms.{name}, made for {MADE_FOR[name]}, and this config has "
                f'{MADE_FOR.get(runs, runs)}: write preset = "{name}", or leave `custom` out to run '
                f"asyncrl.algorithms.{runs}"
            )
            found.append(Problem("algorithm.custom", f"algorithm.custom = {config.algorithm.custom}", why))
    return found


def advantages_of(config: Config) -> Advantages:
    """Returns the estimator of `algorithm.advantage`, shuffled for the control experiment that must not learn."""
    algorithm = config.algorithm
    of_group = advantages.group_estimate(algorithm.advantage, normalize_std=bool(algorithm.normalize_std))
    estimators: dict[str, Advantages] = {
        "group_mean": partial(advantages.group_baseline, estimate=of_group),
        "leave_one_out": partial(advantages.group_baseline, estimate=of_group),
        "batch": advantages.batch_normalized,
        "group_batch": partial(advantages.batch_normalized, first=advantages.group_baseline),
        "greedy": advantages.greedy_baseline,
        "gae": advantages.plain_rewards,
    }
    found = estimators[algorithm.advantage]
    return partial(advantages.shuffled, estimate=found, seed=config.seed) if algorithm.shuffle_advantages else found


# ---- the user's algorithm ------------------------------------------------------------------------------


def algorithm_named(name: str) -> Algorithm:
    """Returns the algorithm that `module:NAME` or `FILE.py:NAME` names, or a module or file with both functions.

    Raises ConfigError when there is none of that name, or it is no algorithm; the message says what to write.
    """
    if name == FROM_PYTHON:
        raise ConfigError(
            f"{KEY}: the run was started from Python with an algorithm that cannot be imported: resume it with the "
            "same call"
        )
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)  # Workers find modules there, and so must the process that starts them.
    if name in PRESETS:
        raise ConfigError(f'{KEY}: {name} is a preset: write algorithm.preset = "{name}"')
    found = resolve(name, KEY) if ":" in name else module_named(name, KEY)
    return algorithm_from(found, f"{KEY} = {name}")


def algorithm_from(given: Any, where: str) -> Algorithm:
    """Returns an `Algorithm` as it is, or makes one of a module or object with the two functions.

    Raises ConfigError, whose text begins with `where`, when a function is missing, not async or takes other arguments.
    """
    if mistakes := [mistake for name in ARGUMENTS if (mistake := _mistake(given, name))]:
        raise ConfigError(f"{where} is no algorithm: {_instead(given) or '; '.join(mistakes)}")
    return given if isinstance(given, Algorithm) else Algorithm(given.roll_out, given.train)


def _instead(given: object) -> str:
    """Says what to write for an object of the wrong kind; empty: its kind is right."""
    if inspect.isroutine(given):
        return "it is one function, and an algorithm has two, write `asyncrl.Algorithm(roll_out, train)`"
    if inspect.isclass(given) and all(callable(getattr(given, name, None)) for name in ARGUMENTS):
        return f"it is a class, give an instance, write `{given.__name__}(...)`"
    return ""


def _mistake(given: object, name: str) -> str:
    """Says what is wrong with one function of an algorithm; empty: nothing."""
    function = getattr(given, name, None)
    arguments = ", ".join(ARGUMENTS[name])
    write = f"write `async def {name}({arguments})`"
    if not callable(function):
        return f"it has no function {name}, {write}"
    calls = (function, getattr(function, "__call__", None))  # noqa: B004
    if not any(inspect.iscoroutinefunction(each) for each in calls):
        kind = "yields" if inspect.isasyncgenfunction(function) else "is not async"
        return f"its {name} {kind}, {write}"
    signature = inspect.signature(function)
    try:
        signature.bind(*ARGUMENTS[name])
    except TypeError:
        return f"its {name} takes ({', '.join(signature.parameters)}) and is called with ({arguments}), {write}"
    return ""


def importable_algorithm(given: object) -> str | None:
    """Returns the name to import this algorithm by in other processes; None: for one of a script or a notebook."""
    if isinstance(given, ModuleType):
        return given.__name__ if sys.modules.get(given.__name__) is given and _importable(given.__name__) else None
    made_by = (getattr(given, "__module__", None), getattr(getattr(given, "roll_out", None), "__module__", None))
    for module in [str(module) for module in made_by if _importable(module)]:
        names = [name for name, value in vars(sys.modules[module]).items() if value is given]
        if names:
            return f"{module}:{names[0]}"
    return None


def _importable(module: str | None) -> bool:
    return module in sys.modules and module != "__main__" and sys.modules[module].__spec__ is not None
