"""Rules about values that are valid one by one and would train wrongly, or not at all, together."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.config.presets import PRESETS
from asyncrl.config.problems import Problem

if TYPE_CHECKING:
    from asyncrl.config.schema import AlgorithmConfig, Config, RewardConfig

ROW_RATIOS = ("gspo", "gmpo")
"""Losses with one ratio a sequence, the mean over its tokens."""
WEIGHT_EPSILON = 1e-9
"""Weights whose sum is smaller sum to 0, but for rounding."""
COUNTED_TWICE = (
    'with "engine" the ratio in the loss is current / behaviour already; a weight beside it would count the staleness '
    'twice: {}, or write old_logprobs = "recomputed"'
)


class Incoherent(ValueError):
    """Raised by a config whose values contradict each other."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


class Rule(NamedTuple):
    """One row of the table of rules.

    keys: keys that the rule is about, separated by spaces. broken: whether a config `c` with the algorithm `a` breaks
    the rule. text: why that is wrong, and what to write instead; `{batch}` stands for the samples of a step.
    """

    keys: str
    broken: "Callable[[Config, AlgorithmConfig], bool]"
    text: str


def rule_problems(config: "Config") -> Iterator[Problem]:
    """Yields every contradiction between values of `config`."""
    for rule in RULES:
        if rule.broken(config, config.algorithm):
            key, *others = rule.keys.split()
            text = rule.text.format(c=config, a=config.algorithm, batch=_batch(config))
            yield Problem(key, "", text, tuple(others))
    limit = config.fleet.call_deadline
    deadlines = {"generation.deadline": config.generation.deadline}
    for name, section in scored_sections(config).items():
        yield from _weight_problems(name, section)
        yield from _name_problems(config, name, section)
        deadlines[f"{name}.deadline"] = section.deadline
    for key, seconds in deadlines.items():
        if seconds > limit:
            text = f"a call is given up after {limit:g} s, so {seconds:g} s are never reached; write {limit:g} or less"
            yield Problem(key, "", text, ("fleet.call_deadline",))


def scored_sections(config: "Config") -> "dict[str, RewardConfig]":
    """Returns the sections of the services that score samples; costs only where the algorithm has costs."""
    return {"reward": config.reward} | ({"cost": config.cost} if config.algorithm.constraint != "none" else {})


def _batch(config: "Config") -> int:
    return config.task.prompts_per_step * config.task.samples_per_prompt


def _constrained(algorithm: "AlgorithmConfig") -> bool:
    return algorithm.constraint != "none" and algorithm.advantage == "gae"


def _weight_beside_ratio(algorithm: "AlgorithmConfig", of_preset: bool) -> bool:
    """Returns whether a weight corrects a ratio to behaviour. of_preset: the preset brings the correction."""
    a = algorithm
    weighted = a.old_logprobs == "engine" and (a.correction != "none" or a.weight_cap is not None)
    return weighted and ("correction" in PRESETS[a.preset].parts) == of_preset


RULES = (
    Rule(
        "task.samples_per_prompt algorithm.advantage",
        lambda c, a: c.task.samples_per_prompt == 1 and a.advantage not in ("batch", "gae", "greedy"),
        "a group of one has no baseline: every advantage would be 0; write 2 or more, or advantage = "
        '"batch", "greedy" or "gae"',
    ),
    Rule(
        "task.samples_per_prompt algorithm.dynamic_sampling",
        lambda c, a: c.task.samples_per_prompt == 1 and a.dynamic_sampling and a.advantage != "greedy",
        "the rewards of a group of one are always equal, so every group would be dropped; write 2 or more",
    ),
    Rule(
        "staleness.cut_at task.samples_per_prompt",
        lambda c, a: isinstance(c.staleness.cut_at, int) and not 2 <= c.staleness.cut_at <= c.task.samples_per_prompt,
        "a part of a group of {c.task.samples_per_prompt} has 2 to {c.task.samples_per_prompt} members; write one of "
        'these or "never"',
    ),
    Rule(
        "algorithm.correction algorithm.weight_cap algorithm.old_logprobs",
        lambda c, a: _weight_beside_ratio(a, of_preset=True),
        COUNTED_TWICE.format('write correction = "none"'),
    ),
    Rule(
        "algorithm.correction algorithm.weight_cap algorithm.old_logprobs",
        lambda c, a: _weight_beside_ratio(a, of_preset=False),
        COUNTED_TWICE.format("remove correction and weight_cap"),
    ),
    Rule(
        "algorithm.loss algorithm.old_logprobs",
        lambda c, a: a.loss == "m2po" and a.old_logprobs != "engine",
        "m2po bounds the ratio current / behaviour itself; another correction would count the staleness twice: "
        'write old_logprobs = "engine"',
    ),
    Rule(
        "algorithm.loss algorithm.rejection",
        lambda c, a: a.loss == "m2po" and a.rejection != "none",
        "both leave out what is furthest from the sampler, so it would be counted twice: remove the rejection",
    ),
    Rule(
        "algorithm.correction algorithm.rejection",
        lambda c, a: (
            a.correction == "mask"
            and a.rejection != "none"
            and a.rejection.startswith("token") == (a.correction_level == "token")
        ),
        "both leave out each {a.correction_level} whose proximal / behaviour is extreme, so it would be counted twice: "
        'write correction = "cap" or rejection = "none"',
    ),
    Rule(
        "algorithm.weight_cap algorithm.correction",
        lambda c, a: (a.weight_cap or 1) < 1 and a.correction != "none",
        "the weight is 1 for a fresh token, so a cap under 1 scales or leaves out all tokens alike and corrects "
        "nothing; write 1 or more",
    ),
    Rule(
        "algorithm.weight_floor",
        lambda c, a: (a.weight_floor or 0) > 1,
        "the weight is 1 for a fresh token, which would be left out; write 1 or less",
    ),
    Rule(
        "algorithm.rejection_low algorithm.rejection_high",
        lambda c, a: a.rejection == "geometric" and not (a.rejection_low or 0) < 1 < (a.rejection_high or 2),
        "the ratio is 1 for a fresh answer, which would be left out; write one under and one over 1",
    ),
    Rule(
        "algorithm.dual_clip algorithm.clip_high",
        lambda c, a: a.dual_clip is not None and a.dual_clip <= 1 + a.clip_high,
        "the second bound must lie beyond the first one; write more than 1 + clip_high (usually 3)",
    ),
    Rule(
        "algorithm.dynamic_sampling algorithm.advantage",
        lambda c, a: a.dynamic_sampling and a.advantage in ("batch", "gae"),
        'advantage = "{a.advantage}" compares with more than the group, so equal rewards are a signal too, and '
        "dropping them would take away what is learnt from groups that are all right or all wrong: remove "
        "dynamic_sampling",
    ),
    Rule(
        "algorithm.loss algorithm.advantage",
        lambda c, a: a.advantage == "gae" and a.loss == "gmpo",
        "gmpo bounds a row by the sign of its advantage, and a critic gives each token an advantage of its own: write "
        'loss = "clip" or "gspo"',
    ),
    Rule(
        "algorithm.kl_target algorithm.kl_in algorithm.advantage",
        lambda c, a: a.advantage == "gae" and a.kl_target is not None and a.kl_in == "reward",
        "the KL is part of the rewards that policy and critic both learn from, so its coefficient is fixed: remove "
        'kl_target, or write kl_in = "loss" with kl_estimator = "k2"',
    ),
    Rule(
        "algorithm.constraint algorithm.advantage",
        lambda c, a: a.constraint != "none" and a.advantage != "gae",
        'costs are held under their limit with values of critics, and advantage = "{a.advantage}" has no critic: write '
        'preset = "safe_rlhf"',
    ),
    Rule(
        "cost.functions cost.model algorithm.constraint",
        lambda c, a: _constrained(a) and not c.cost.functions and not c.cost.model,
        "there is no cost of an answer: write cost.functions, cost.model or both",
    ),
    Rule(
        "cost.limit algorithm.constraint",
        lambda c, a: _constrained(a) and c.cost.limit is None,
        "costs are held under it: write the largest mean cost of an answer",
    ),
    Rule(
        "cost.multiplier cost.multiplier_max",
        lambda c, a: _constrained(a) and c.cost.multiplier > c.cost.multiplier_max,
        "the multiplier would begin above its bound, cost.multiplier_max = {c.cost.multiplier_max:g}; begin lower, or "
        "write a higher bound",
    ),
    Rule(
        "algorithm.shuffle_advantages algorithm.constraint",
        lambda c, a: _constrained(a) and a.shuffle_advantages,
        "only rewards are shuffled, and costs would be learnt: remove one",
    ),
    Rule(
        "algorithm.pretrain_coefficient task.pretrain",
        lambda c, a: a.pretrain_coefficient > 0 and not c.task.pretrain,
        "there are no texts for it: write task.pretrain, a source of rows with a `text`",
    ),
    Rule(
        "algorithm.pretrain_coefficient task.pretrain",
        lambda c, a: a.pretrain_coefficient == 0 and bool(c.task.pretrain),
        "these texts would not be learnt: write pretrain_coefficient, or remove task.pretrain",
    ),
    Rule(
        "task.pretrain_per_step training.updates",
        lambda c, a: a.pretrain_coefficient > 0 and c.task.pretrain_per_step < c.training.updates,
        "each of {c.training.updates} updates takes a share of the texts of a step; write as many or more",
    ),
    Rule(
        "algorithm.loss algorithm.kl_in",
        lambda c, a: a.loss == "gmpo" and a.kl > 0 and a.kl_in == "reward",
        "gmpo bounds a row by the sign of its advantage, and a KL in the reward gives each token an advantage of its "
        'own: write kl_in = "loss" with kl_estimator = "k2"',
    ),
    Rule(
        "algorithm.loss algorithm.aggregation",
        lambda c, a: a.loss in ROW_RATIOS and a.aggregation != "sequence_mean_token_mean",
        "{a.loss} has one term a sequence, of which every token carries a part; "
        'write aggregation = "sequence_mean_token_mean"',
    ),
    Rule(
        "algorithm.kl_estimator algorithm.kl_in",
        lambda c, a: a.kl > 0 and a.kl_in == "loss" and a.kl_estimator == "k1",
        "k1 as a loss has zero expected gradient, and k3 as a loss is a biased approximation; "
        'right are k2 in the loss and k1 with kl_in = "reward"',
    ),
    Rule(
        "algorithm.kl_in algorithm.kl_estimator",
        lambda c, a: a.kl > 0 and a.kl_in == "reward" and a.kl_estimator != "k1",
        "in the reward only k1 has the gradient of the KL, {a.kl_estimator} has another one: "
        'write kl_estimator = "k1", or kl_in = "loss" with k2',
    ),
    Rule(
        "training.updates task.prompts_per_step task.samples_per_prompt",
        lambda c, a: c.training.updates > _batch(c),
        "a step has {batch} samples, which cannot be split over {c.training.updates} updates",
    ),
    Rule(
        "training.warmup_steps steps",
        lambda c, a: c.training.schedule != "constant" and c.training.warmup_steps >= c.steps,
        "the learning rate falls after the warm-up, which takes all of the {c.steps} steps; write fewer",
    ),
    Rule(
        "training.layout_dp task.prompts_per_step task.samples_per_prompt",
        lambda c, a: c.training.layout_dp > _batch(c),
        "a step has {batch} samples, which leaves some of {c.training.layout_dp} ranks without any; write {batch} or "
        "fewer",
    ),
    Rule(
        "training.layout_dp fleet.wire",
        lambda c, a: c.training.layout_dp > 1 and c.fleet.wire == "inproc",
        'ranks of the trainer are processes, and "inproc" has only one; write layout_dp = 1 or wire = "ipc"',
    ),
    Rule(
        "evaluate.samples evaluate.temperature",
        lambda c, a: c.evaluate.samples > 1 and c.evaluate.temperature == 0,
        "at temperature 0 all samples of a prompt are the same; write samples = 1 or a temperature over 0",
    ),
)
"""Rules in the order in which their problems are reported."""


def _name_problems(config: "Config", name: str, section: "RewardConfig") -> Iterator[Problem]:
    key = f"{name}.functions"
    names = [*section.terms, *(["overlong"] if config.algorithm.overlong and name == "reward" else [])]
    for twice in sorted({each for each in names if names.count(each) > 1}):
        text = f"two functions are called {twice!r}; give each its own `name`, because metrics carry it"
        yield Problem(key, "", text)
    grouped = [function.name or function.use for function in section.functions if function.group]
    if grouped and name == "reward" and config.algorithm.advantage == "greedy":
        text = (
            f"{grouped[0]} scores the members of a group together, and a greedy answer is scored alone: write a "
            "function that takes a single sample, or another advantage"
        )
        yield Problem(key, "", text, ("algorithm.advantage",))


def _weight_problems(name: str, section: "RewardConfig") -> Iterator[Problem]:
    """Checks the weights of a section's functions and model. A cost may have negative weights only."""
    weights = [function.weight for function in section.functions] + ([section.weight] if section.model else [])
    parts = {"functions": section.functions, "weight": section.model}
    key, *others = [f"{name}.{part}" for part, given in parts.items() if given] or [""]
    if weights and abs(sum(weights)) < WEIGHT_EPSILON:
        text = (
            f"the weights, {' and '.join(f'{weight:g}' for weight in weights)}, sum to 0: what all functions agree on "
            "is worth nothing; write weights of another sum (a function of weight 0 is only reported)"
        )
        yield Problem(key, "", text, tuple(others))
    elif weights and max(weights) <= 0 and name == "reward":
        text = (
            "no weight is over 0, so the run would train for low values of every function; write a positive weight, "
            "and let a function that counts what is bad return it with a minus"
        )
        yield Problem(key, "", text, tuple(others))
