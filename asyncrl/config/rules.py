"""Rules about values that are valid one by one but not together.

A rule refuses what would train wrongly. What nothing reads, and what changes nothing else, is a warning that `asyncrl
run` and `asyncrl doctor` print. Rules about the section `[algorithm]` are in `algorithm_rules.py`.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from asyncrl.config.algorithm_rules import ALGORITHM_CHECKS, ALGORITHM_RULES
from asyncrl.config.problems import Problem, Rule, batch_samples

if TYPE_CHECKING:
    from asyncrl.config.schema import Config


class Incoherent(ValueError):
    """Raised by a config whose values contradict each other."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


WEIGHT_EPSILON = 1e-9
"""Weights whose sum is smaller sum to 0, but for rounding."""

RULES = (
    Rule(
        "task.samples_per_prompt algorithm.advantage",
        lambda c: c.task.samples_per_prompt == 1 and c.algorithm.advantage not in ("batch", "gae", "greedy"),
        "a group of one has no baseline: every advantage would be 0; write 2 or more, or advantage = "
        '"batch", "greedy" or "gae"',
    ),
    Rule(
        "task.samples_per_prompt algorithm.dynamic_sampling",
        lambda c: c.task.samples_per_prompt == 1 and c.algorithm.dynamic_sampling and c.algorithm.advantage != "greedy",
        "the rewards of a group of one are always equal, so every group would be dropped; write 2 or more",
    ),
    Rule(
        "staleness.cut_at staleness.policy",
        lambda c: isinstance(c.staleness.cut_at, int) and c.staleness.policy != "mask",
        'nothing reads it with policy = "{c.staleness.policy}", because only "mask" cuts groups: remove it',
        is_warning=True,
    ),
    Rule(
        "staleness.cut_at task.samples_per_prompt",
        lambda c: isinstance(c.staleness.cut_at, int) and not 2 <= c.staleness.cut_at <= c.task.samples_per_prompt,
        "a part of a group of {c.task.samples_per_prompt} has 2 to {c.task.samples_per_prompt} members; write one of "
        'these or "never"',
    ),
    *ALGORITHM_RULES,
    Rule(
        "model.float32_head model.dtype training.precision",
        lambda c: c.model.float32_head and c.model.dtype == c.training.precision == "float32",
        "it changes nothing, because everything is computed in float32 already: remove float32_head",
        is_warning=True,
    ),
    Rule(
        "training.updates task.prompts_per_step task.samples_per_prompt",
        lambda c: c.training.updates > batch_samples(c),
        "a step has {batch} samples, which cannot be split over {c.training.updates} updates",
    ),
    Rule(
        "training.warmup_steps steps",
        lambda c: c.training.schedule != "constant" and c.training.warmup_steps >= c.steps,
        "the learning rate falls after the warm-up, which takes all of the {c.steps} steps; write fewer",
    ),
    Rule(
        "training.layout_dp task.prompts_per_step task.samples_per_prompt",
        lambda c: c.training.layout_dp > batch_samples(c),
        "a step has {batch} samples, which leaves some of {c.training.layout_dp} ranks without any; write {batch} or "
        "fewer",
    ),
    Rule(
        "training.layout_dp fleet.wire",
        lambda c: c.training.layout_dp > 1 and c.fleet.wire == "inproc",
        'ranks of the trainer are processes, and "inproc" has only one; write layout_dp = 1 or wire = "ipc"',
    ),
    Rule(
        "evaluate.samples evaluate.temperature",
        lambda c: c.evaluate.samples > 1 and c.evaluate.temperature == 0,
        "at temperature 0 all samples of a prompt are the same; write samples = 1 or a temperature over 0",
    ),
)
"""Rules in the order in which their problems are reported."""


def rule_problems(config: "Config") -> list[Problem]:
    """Returns every problem and warning about values of `config` that do not fit together."""
    found = [problem for rule in RULES for problem in rule.problems(config)]
    return found + [problem for check in CHECKS for problem in check(config)]


def _check_weights(config: "Config") -> Iterator[Problem]:
    """Checks the weights of a section's functions and model. A cost may have negative weights only."""
    sections = {"reward": config.reward} | ({"cost": config.cost} if config.algorithm.constraint != "none" else {})
    for name, section in sections.items():
        weights = [function.weight for function in section.functions] + ([section.weight] if section.model else [])
        parts = {"functions": section.functions, "weight": section.model}
        key, *others = [f"{name}.{part}" for part, given in parts.items() if given] or [""]
        if weights and abs(sum(weights)) < WEIGHT_EPSILON:
            written = " and ".join(f"{weight:g}" for weight in weights)
            yield Problem(
                key,
                "",
                f"the weights, {written}, sum to 0: what all functions agree on is worth nothing; write weights of "
                "another sum (a function of weight 0 is only reported)",
                tuple(others),
            )
        elif weights and max(weights) <= 0 and name == "reward":
            yield Problem(
                key,
                "",
                "no weight is over 0, so the run would train for low values of every function; write a positive "
                "weight, and let a function that counts what is bad return it with a minus",
                tuple(others),
            )


def _check_deadlines(config: "Config") -> Iterator[Problem]:
    inner = {"generation.deadline": config.generation.deadline, "reward.deadline": config.reward.deadline}
    if config.algorithm.constraint != "none":
        inner["cost.deadline"] = config.cost.deadline
    limit = config.fleet.call_deadline
    for key, seconds in inner.items():
        if seconds > limit:
            text = f"a call is given up after {limit:g} s, so {seconds:g} s are never reached; write {limit:g} or less"
            yield Problem(key, "", text, ("fleet.call_deadline",))


def _check_greedy_answers(config: "Config") -> Iterator[Problem]:
    grouped = [function.name or function.use for function in config.reward.functions if function.group]
    if grouped and config.algorithm.advantage == "greedy":
        text = (
            f"{grouped[0]} scores the members of a group together, and a greedy answer is scored alone: write a "
            "function that takes a single sample, or another advantage"
        )
        yield Problem("reward.functions", "", text, ("algorithm.advantage",))


def _check_names(config: "Config") -> Iterator[Problem]:
    names = [function.name or function.use for function in config.reward.functions]
    names += ["overlong"] if config.algorithm.overlong else []
    for name in sorted({name for name in names if names.count(name) > 1}):
        text = f"two functions are called {name!r}; give each its own `name`, because metrics carry it"
        yield Problem("reward.functions", "", text)


CHECKS: tuple[Callable[["Config"], Iterator[Problem]], ...] = (
    *ALGORITHM_CHECKS,
    _check_weights,
    _check_deadlines,
    _check_greedy_answers,
    _check_names,
)
"""Checks whose keys depend on the config."""
