"""What a config chose: the page that is run, and the estimator of advantages."""

from asyncrl.algorithms import grpo, ppo, remax, safe_rlhf
from asyncrl.algorithms.own import blamed, page_named
from asyncrl.config import Algorithm, Config
from asyncrl.controller import Page
from asyncrl.errors import ConfigError
from asyncrl.objectives.advantages import (
    Advantages,
    BatchNormalized,
    GreedyBaseline,
    GroupBaseline,
    LeaveOneOut,
    Rewards,
    Shuffled,
)

SHIPPED = {"grpo": grpo.PAGE, "remax": remax.PAGE, "ppo": ppo.PAGE, "safe_rlhf": safe_rlhf.PAGE}
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
"""Whose `train` finds the services that it calls. Who rolls out otherwise may want critics that do not learn."""


def page_of(config: Config) -> Page:
    """The page of the algorithm: all that need no service or row beside those of GRPO share its page.

    Raises:
        ConfigError: `algorithm.page` names none.
    """
    if config.algorithm.page:
        return blamed(page_named(config.algorithm.page), config.algorithm.page)
    return SHIPPED[_shipped(config.algorithm)]


def _shipped(algorithm: Algorithm) -> str:
    """The name of the page that comes with asyncrl for this algorithm."""
    if algorithm.constraint == "lagrangian":
        return "safe_rlhf"
    return {"gae": "ppo", "greedy": "remax"}.get(algorithm.advantage, "grpo")


def page_mistakes(config: Config, given: Page | None = None) -> list[str]:
    """Why `algorithm.page`, or the page that was given as an object, cannot run; empty: it can."""
    if not config.algorithm.page:
        return []
    try:
        page = given or page_of(config)
    except ConfigError as error:
        return [str(error)]
    runs = _shipped(config.algorithm)
    return [
        f"algorithm.page = {config.algorithm.page}: its {function} is that of asyncrl.algorithms.{name}, made for "
        f'{MADE_FOR[name]}, and this config has {MADE_FOR[runs]}: write preset = "{name}", or leave `page` out to run '
        f"asyncrl.algorithms.{runs}"
        for function, names in (("roll_out", {runs}), ("train", TRAIN_RUNS[runs]))
        if (name := _shipped_function(page, function)) and name not in names
    ]


def _shipped_function(page: Page, function: str) -> str:
    """Whose this function of a page is; empty: the user's own."""
    its = getattr(page, function)
    its = getattr(its, "__wrapped__", its)  # by `blamed`
    return next((name for name, shipped in SHIPPED.items() if getattr(shipped, function) is its), "")


def advantages_of(config: Config) -> Advantages:
    """The estimator of `algorithm.advantage`, or the control that must not learn."""
    estimate = _estimator(config.algorithm)
    return Shuffled(estimate, config.seed) if config.algorithm.shuffle_advantages else estimate


def _estimator(algorithm: Algorithm) -> Advantages:
    match algorithm.advantage:
        case "group_mean":
            return GroupBaseline(bool(algorithm.normalize_std))
        case "leave_one_out":
            return LeaveOneOut()
        case "batch":
            return BatchNormalized()
        case "group_batch":
            return BatchNormalized(GroupBaseline())
        case "greedy":
            return GreedyBaseline()
        case "gae":
            return Rewards()
