"""Selects the algorithm and the estimator of advantages that a config asks for."""

from dataclasses import replace
from functools import partial

from asyncrl.algorithms import grpo, ppo, remax, safe_rlhf
from asyncrl.algorithms.custom import algorithm_named
from asyncrl.config.problems import Problem
from asyncrl.config.schema import AlgorithmConfig, Config
from asyncrl.controller.algorithm import Algorithm
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
TRAIN_RUNS = {
    "grpo": {"grpo", "remax"},
    "remax": {"grpo", "remax"},
    "ppo": {"grpo", "remax", "ppo"},
    "safe_rlhf": {"grpo", "remax", "ppo", "safe_rlhf"},
}
"""For the services of each algorithm, the algorithms whose `train` finds there every service that it calls."""


def algorithm_of(config: Config) -> Algorithm:
    """Returns the algorithm to run; configs that need no other service or row than GRPO share its algorithm.

    Raises:
        ConfigError: `algorithm.custom` names no algorithm.
    """
    if config.algorithm.custom:
        return replace(algorithm_named(config.algorithm.custom), name=config.algorithm.custom)
    return SHIPPED[_shipped(config.algorithm)]


def _shipped(algorithm: AlgorithmConfig) -> str:
    """Returns the name of the algorithm of asyncrl that fits this section."""
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
    runs, found = _shipped(config.algorithm), []
    for function, names in (("roll_out", {runs}), ("train", TRAIN_RUNS[runs])):
        its = getattr(algorithm, function)
        name = next((name for name, shipped in SHIPPED.items() if getattr(shipped, function) is its), None)
        if name is not None and name not in names:
            why = (
                f"its {function} is that of asyncrl.algorithms.{name}, made for {MADE_FOR[name]}, and this config has "
                f'{MADE_FOR[runs]}: write preset = "{name}", or leave `custom` out to run asyncrl.algorithms.{runs}'
            )
            found.append(Problem("algorithm.custom", f"algorithm.custom = {config.algorithm.custom}", why))
    return found


def advantages_of(config: Config) -> Advantages:
    """Returns the estimator of `algorithm.advantage`, shuffled for the control experiment that must not learn."""
    algorithm = config.algorithm
    estimators: dict[str, Advantages] = {
        "group_mean": partial(advantages.group_baseline, normalize_std=bool(algorithm.normalize_std)),
        "leave_one_out": advantages.leave_one_out,
        "batch": advantages.batch_normalized,
        "group_batch": partial(advantages.batch_normalized, first=advantages.group_baseline),
        "greedy": advantages.greedy_baseline,
        "gae": advantages.plain_rewards,
    }
    found = estimators[algorithm.advantage]
    return partial(advantages.shuffled, estimate=found, seed=config.seed) if algorithm.shuffle_advantages else found
