"""Values that are each valid but make no sense together. All contradictions of a config are found at once.

Those of the section `[algorithm]` are in `algorithms/coherence.py`.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from asyncrl.algorithms.coherence import ALGORITHM_RULES
from asyncrl.contradiction import Contradiction

if TYPE_CHECKING:
    from asyncrl.config import Config


class Incoherent(ValueError):
    """Raised when a config is made whose values contradict each other."""

    def __init__(self, contradictions: list[Contradiction]) -> None:
        super().__init__("; ".join(f"{', '.join(found.keys)}: {found.text}" for found in contradictions))
        self.contradictions = contradictions


NOTHING = 1e-9
"""A sum of weights that rounding alone keeps from 0."""

Rule = Callable[["Config"], Iterator[Contradiction]]


def contradictions(config: "Config") -> list[Contradiction]:
    """Everything in `config` that does not fit together, in the order of the sections."""
    return [found for rule in _RULES for found in rule(config)]


def _group(config: "Config") -> Iterator[Contradiction]:
    members, algorithm = config.task.samples_per_prompt, config.algorithm
    if members >= 2:
        return
    if algorithm.advantage not in ("batch", "gae", "greedy"):
        yield Contradiction(
            ("task.samples_per_prompt", "algorithm.advantage"),
            "a group of one has no baseline: every advantage would be 0; write 2 or more, or advantage = "
            '"batch", "greedy" or "gae"',
        )
    if algorithm.dynamic_sampling and algorithm.advantage != "greedy":
        yield Contradiction(
            ("task.samples_per_prompt", "algorithm.dynamic_sampling"),
            "the rewards of a group of one are always equal, so every group would be dropped; write 2 or more",
        )


def _cut(config: "Config") -> Iterator[Contradiction]:
    keys, cut_at, policy = ("staleness.cut_at",), config.staleness.cut_at, config.staleness.policy
    if cut_at is None or cut_at == "never":
        return
    if policy != "mask":
        yield Contradiction(
            (*keys, "staleness.policy"), f'only the policy "mask" cuts groups; "{policy}" would ignore it: remove it'
        )
    if not 2 <= cut_at <= config.task.samples_per_prompt:
        members = config.task.samples_per_prompt
        yield Contradiction(
            (*keys, "task.samples_per_prompt"),
            f'a part of a group of {members} has 2 to {members} members; write one of these or "never"',
        )


def _head(config: "Config") -> Iterator[Contradiction]:
    if config.model.float32_head and config.model.dtype == config.training.precision == "float32":
        yield Contradiction(
            ("model.float32_head", "model.dtype", "training.precision"),
            "all is computed in float32 already: remove float32_head",
        )


def _updates(config: "Config") -> Iterator[Contradiction]:
    samples = config.task.prompts_per_step * config.task.samples_per_prompt
    if config.training.updates > samples:
        yield Contradiction(
            ("training.updates", "task.prompts_per_step", "task.samples_per_prompt"),
            f"a step has {samples} samples, which cannot be split over {config.training.updates} updates",
        )
    if config.training.schedule != "constant" and config.training.warmup_steps >= config.steps:
        yield Contradiction(
            ("training.warmup_steps", "steps"),
            f"the schedule falls after the warm-up, which takes all of the {config.steps} steps; write fewer",
        )


def _ranks(config: "Config") -> Iterator[Contradiction]:
    ranks, samples = config.training.layout_dp, config.task.prompts_per_step * config.task.samples_per_prompt
    if ranks > samples:
        yield Contradiction(
            ("training.layout_dp", "task.prompts_per_step", "task.samples_per_prompt"),
            f"a step has {samples} samples, which leaves some of {ranks} ranks without any; write {samples} or fewer",
        )
    if ranks > 1 and config.fleet.wire == "inproc":
        yield Contradiction(
            ("training.layout_dp", "fleet.wire"),
            'ranks of the trainer are processes, and "inproc" has only one; write layout_dp = 1 or wire = "ipc"',
        )


def _evaluation(config: "Config") -> Iterator[Contradiction]:
    if config.evaluate.samples > 1 and config.evaluate.temperature == 0:
        yield Contradiction(
            ("evaluate.samples", "evaluate.temperature"),
            "at temperature 0 all samples of a prompt are the same; write samples = 1 or a temperature over 0",
        )


def _weights(config: "Config") -> Iterator[Contradiction]:
    """Of a section's functions and, beside them, its model. What is bad may cost what a function takes off a reward."""
    sections = {"reward": config.reward} | ({"cost": config.cost} if config.algorithm.constraint != "none" else {})
    for name, section in sections.items():
        weights = [function.weight for function in section.functions] + ([section.weight] if section.model else [])
        parts = {"functions": section.functions, "weight": section.model}
        keys = tuple(f"{name}.{key}" for key, given in parts.items() if given)
        if weights and abs(sum(weights)) < NOTHING:
            written = " and ".join(f"{weight:g}" for weight in weights)
            yield Contradiction(
                keys,
                f"the weights, {written}, sum to 0: what all functions agree on is worth nothing; write weights of "
                "another sum (a function of weight 0 is only reported)",
            )
        elif weights and max(weights) <= 0 and name == "reward":
            yield Contradiction(
                keys,
                "no weight is over 0, so the run would train for low values of every function; write a positive "
                "weight, and let a function that counts what is bad return it with a minus",
            )


def _deadlines(config: "Config") -> Iterator[Contradiction]:
    inner_ones = {"generation.deadline": config.generation.deadline, "reward.deadline": config.reward.deadline}
    if config.algorithm.constraint != "none":
        inner_ones["cost.deadline"] = config.cost.deadline
    for key, inner in inner_ones.items():
        if inner > config.fleet.call_deadline:
            yield Contradiction(
                (key, "fleet.call_deadline"),
                f"a call is given up after {config.fleet.call_deadline:g} s, so {inner:g} s are never reached",
            )


def _rewards(config: "Config") -> Iterator[Contradiction]:
    grouped = [function.name or function.use for function in config.reward.functions if function.group]
    if grouped and config.algorithm.advantage == "greedy":
        yield Contradiction(
            ("reward.functions", "algorithm.advantage"),
            f"{grouped[0]} scores the members of a group together, and a greedy answer is scored alone: write one "
            "that takes a single sample, or another advantage",
        )
    names = [function.name or function.use for function in config.reward.functions]
    names += ["overlong"] if config.algorithm.overlong else []
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Contradiction(
            ("reward.functions",), f"two functions are called {name!r}; give each its own `name`, metrics carry it"
        )


_RULES: tuple[Rule, ...] = (
    _group,
    _cut,
    *ALGORITHM_RULES,
    _head,
    _updates,
    _ranks,
    _evaluation,
    _weights,
    _deadlines,
    _rewards,
)
