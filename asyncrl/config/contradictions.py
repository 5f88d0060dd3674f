"""Rules about values that are valid one by one and would train wrongly, or not at all, together."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.presets import PRESETS
from asyncrl.config.problems import Problem

if TYPE_CHECKING:
    from asyncrl.config.schema import AlgorithmConfig, Config, RewardConfig

ROW_RATIOS = ("gspo", "gmpo")
"""Losses with one ratio a sequence, the mean over its tokens."""
WEIGHT_EPSILON = 1e-9
"""Weights whose sum is smaller sum to 0, but for rounding."""


class Incoherent(ValueError):
    """Raised by a config whose values contradict each other."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def rule_problems(config: "Config") -> Iterator[Problem]:
    """Yields every contradiction between values of `config`."""
    yield from _group_rules(config)
    yield from _weight_rules(config.algorithm)
    yield from _advantage_rules(config.algorithm)
    yield from _cost_rules(config)
    yield from _pretraining_rules(config)
    yield from _loss_rules(config.algorithm)
    yield from _step_rules(config)
    for name, section in scored_sections(config).items():
        yield from _scored_weight_rules(name, section)
        yield from _term_rules(config, name, section)
    yield from _deadline_rules(config)


def scored_sections(config: "Config") -> "dict[str, RewardConfig]":
    """Returns the sections of the services that score samples; costs only where the algorithm has costs."""
    return {"reward": config.reward} | ({"cost": config.cost} if config.algorithm.constraint != "none" else {})


def _wrong(keys: str, text: str) -> Problem:
    """Makes a problem. keys: keys that it is about, separated by spaces."""
    key, *others = keys.split()
    return Problem(key, "", text, tuple(others))


def _group_rules(config: "Config") -> Iterator[Problem]:
    members, cut_at, a = config.task.samples_per_prompt, config.staleness.cut_at, config.algorithm
    if members == 1 and a.advantage not in ("batch", "gae", "greedy"):
        text = (
            "a group of one has no baseline: every advantage would be 0; write 2 or more, or advantage = "
            '"batch", "greedy" or "gae"'
        )
        yield _wrong("task.samples_per_prompt algorithm.advantage", text)
    if members == 1 and a.dynamic_sampling and a.advantage != "greedy":
        text = "the rewards of a group of one are always equal, so every group would be dropped; write 2 or more"
        yield _wrong("task.samples_per_prompt algorithm.dynamic_sampling", text)
    if isinstance(cut_at, int) and not 2 <= cut_at <= members:
        text = f'a part of a group of {members} has 2 to {members} members; write one of these or "never"'
        yield _wrong("staleness.cut_at task.samples_per_prompt", text)


def _weight_rules(a: "AlgorithmConfig") -> Iterator[Problem]:
    """Refuses weights, masks and rejections that count the staleness twice, or leave out fresh tokens."""
    if a.old_logprobs == "engine" and (a.correction != "none" or a.weight_cap is not None):
        is_of_preset = "correction" in PRESETS[a.preset].parts
        advice = 'write correction = "none"' if is_of_preset else "remove correction and weight_cap"
        text = (
            'with "engine" the ratio in the loss is current / behaviour already; a weight beside it would count the '
            f'staleness twice: {advice}, or write old_logprobs = "recomputed"'
        )
        yield _wrong("algorithm.correction algorithm.weight_cap algorithm.old_logprobs", text)
    if a.loss == "m2po" and a.old_logprobs != "engine":
        text = (
            "m2po bounds the ratio current / behaviour itself; another correction would count the staleness twice: "
            'write old_logprobs = "engine"'
        )
        yield _wrong("algorithm.loss algorithm.old_logprobs", text)
    if a.loss == "m2po" and a.rejection != "none":
        text = "both leave out what is furthest from the sampler, so it would be counted twice: remove the rejection"
        yield _wrong("algorithm.loss algorithm.rejection", text)
    rejected = "token" if a.rejection.startswith("token") else "sequence"
    if a.correction == "mask" and a.rejection != "none" and a.correction_level == rejected:
        text = (
            f"both leave out each {rejected} whose proximal / behaviour is extreme, so it would be counted twice: "
            'write correction = "cap" or rejection = "none"'
        )
        yield _wrong("algorithm.correction algorithm.rejection", text)
    if (a.weight_cap or 1) < 1 and a.correction != "none":
        text = (
            "the weight is 1 for a fresh token, so a cap under 1 scales or leaves out all tokens alike and corrects "
            "nothing; write 1 or more"
        )
        yield _wrong("algorithm.weight_cap algorithm.correction", text)
    if (a.weight_floor or 0) > 1:
        text = "the weight is 1 for a fresh token, which would be left out; write 1 or less"
        yield _wrong("algorithm.weight_floor", text)
    if a.rejection == "geometric" and not (a.rejection_low or 0) < 1 < (a.rejection_high or 2):
        text = "the ratio is 1 for a fresh answer, which would be left out; write one under and one over 1"
        yield _wrong("algorithm.rejection_low algorithm.rejection_high", text)


def _advantage_rules(a: "AlgorithmConfig") -> Iterator[Problem]:
    if a.dynamic_sampling and a.advantage in ("batch", "gae"):
        text = (
            f'advantage = "{a.advantage}" compares with more than the group, so equal rewards are a signal too, and '
            "dropping them would take away what is learnt from groups that are all right or all wrong: remove "
            "dynamic_sampling"
        )
        yield _wrong("algorithm.dynamic_sampling algorithm.advantage", text)
    if a.advantage == "gae" and a.loss == "gmpo":
        text = (
            "gmpo bounds a row by the sign of its advantage, and a critic gives each token an advantage of its own: "
            'write loss = "clip" or "gspo"'
        )
        yield _wrong("algorithm.loss algorithm.advantage", text)
    if a.advantage == "gae" and a.kl_target is not None and a.kl_in == "reward":
        text = (
            "the KL is part of the rewards that policy and critic both learn from, so its coefficient is fixed: remove "
            'kl_target, or write kl_in = "loss" with kl_estimator = "k2"'
        )
        yield _wrong("algorithm.kl_target algorithm.kl_in algorithm.advantage", text)


def _cost_rules(config: "Config") -> Iterator[Problem]:
    a, cost = config.algorithm, config.cost
    if a.constraint == "none":
        return
    if a.advantage != "gae":
        text = (
            f'costs are held under their limit with values of critics, and advantage = "{a.advantage}" has no critic: '
            'write preset = "safe_rlhf"'
        )
        yield _wrong("algorithm.constraint algorithm.advantage", text)
        return
    if not cost.functions and not cost.model:
        text = "there is no cost of an answer: write cost.functions, cost.model or both"
        yield _wrong("cost.functions cost.model algorithm.constraint", text)
    if cost.limit is None:
        text = "costs are held under it: write the largest mean cost of an answer"
        yield _wrong("cost.limit algorithm.constraint", text)
    if cost.multiplier > cost.multiplier_max:
        bound = f"cost.multiplier_max = {cost.multiplier_max:g}"
        text = f"the multiplier would begin above its bound, {bound}; begin lower, or write a higher bound"
        yield _wrong("cost.multiplier cost.multiplier_max", text)
    if a.shuffle_advantages:
        text = "only rewards are shuffled, and costs would be learnt: remove one"
        yield _wrong("algorithm.shuffle_advantages algorithm.constraint", text)


def _pretraining_rules(config: "Config") -> Iterator[Problem]:
    task, is_learnt = config.task, config.algorithm.pretrain_coefficient > 0
    if is_learnt and not task.pretrain:
        text = "there are no texts for it: write task.pretrain, a source of rows with a `text`"
        yield _wrong("algorithm.pretrain_coefficient task.pretrain", text)
    if task.pretrain and not is_learnt:
        text = "these texts would not be learnt: write pretrain_coefficient, or remove task.pretrain"
        yield _wrong("algorithm.pretrain_coefficient task.pretrain", text)
    updates = config.training.updates
    if is_learnt and task.pretrain_per_step < updates:
        text = f"each of {updates} updates takes a share of the texts of a step; write as many or more"
        yield _wrong("task.pretrain_per_step training.updates", text)


def _loss_rules(a: "AlgorithmConfig") -> Iterator[Problem]:
    if a.loss == "gmpo" and a.kl > 0 and a.kl_in == "reward":
        text = (
            "gmpo bounds a row by the sign of its advantage, and a KL in the reward gives each token an advantage of "
            'its own: write kl_in = "loss" with kl_estimator = "k2"'
        )
        yield _wrong("algorithm.loss algorithm.kl_in", text)
    if a.dual_clip is not None and a.dual_clip <= 1 + a.clip_high:
        text = "the second bound must lie beyond the first one; write more than 1 + clip_high (usually 3)"
        yield _wrong("algorithm.dual_clip algorithm.clip_high", text)
    if a.loss in ROW_RATIOS and a.aggregation != "sequence_mean_token_mean":
        text = (
            f"{a.loss} has one term a sequence, of which every token carries a part; "
            'write aggregation = "sequence_mean_token_mean"'
        )
        yield _wrong("algorithm.loss algorithm.aggregation", text)
    if a.kl > 0 and a.kl_in == "loss" and a.kl_estimator == "k1":
        text = (
            "k1 as a loss has zero expected gradient, and k3 as a loss is a biased approximation; "
            'right are k2 in the loss and k1 with kl_in = "reward"'
        )
        yield _wrong("algorithm.kl_estimator algorithm.kl_in", text)
    if a.kl > 0 and a.kl_in == "reward" and a.kl_estimator != "k1":
        text = (
            f"in the reward only k1 has the gradient of the KL, {a.kl_estimator} has another one: "
            'write kl_estimator = "k1", or kl_in = "loss" with k2'
        )
        yield _wrong("algorithm.kl_in algorithm.kl_estimator", text)


def _step_rules(config: "Config") -> Iterator[Problem]:
    training, evaluate = config.training, config.evaluate
    batch = config.task.prompts_per_step * config.task.samples_per_prompt
    if training.updates > batch:
        text = f"a step has {batch} samples, which cannot be split over {training.updates} updates"
        yield _wrong("training.updates task.prompts_per_step task.samples_per_prompt", text)
    if training.schedule != "constant" and training.warmup_steps >= config.steps:
        text = f"the learning rate falls after the warm-up, which takes all of the {config.steps} steps; write fewer"
        yield _wrong("training.warmup_steps steps", text)
    if training.layout_dp > batch:
        ranks = f"some of {training.layout_dp} ranks without any"
        text = f"a step has {batch} samples, which leaves {ranks}; write {batch} or fewer"
        yield _wrong("training.layout_dp task.prompts_per_step task.samples_per_prompt", text)
    if training.layout_dp > 1 and config.fleet.wire == "inproc":
        text = 'ranks of the trainer are processes, and "inproc" has only one; write layout_dp = 1 or wire = "ipc"'
        yield _wrong("training.layout_dp fleet.wire", text)
    if evaluate.samples > 1 and evaluate.temperature == 0:
        text = "at temperature 0 all samples of a prompt are the same; write samples = 1 or a temperature over 0"
        yield _wrong("evaluate.samples evaluate.temperature", text)


def _scored_weight_rules(name: str, section: "RewardConfig") -> Iterator[Problem]:
    """Checks the weights of a section's functions and model. A cost may have negative weights only."""
    parts = {"functions": section.functions, "weight": section.model}
    keys = " ".join(f"{name}.{part}" for part, given in parts.items() if given)
    weights = [function.weight for function in section.functions] + ([section.weight] if section.model else [])
    if weights and abs(sum(weights)) < WEIGHT_EPSILON:
        text = (
            f"the weights, {' and '.join(f'{weight:g}' for weight in weights)}, sum to 0: what all functions agree on "
            "is worth nothing; write weights of another sum (a function of weight 0 is only reported)"
        )
        yield _wrong(keys, text)
    elif weights and max(weights) <= 0 and name == "reward":
        text = (
            "no weight is over 0, so the run would train for low values of every function; write a positive weight, "
            "and let a function that counts what is bad return it with a minus"
        )
        yield _wrong(keys, text)


def _term_rules(config: "Config", name: str, section: "RewardConfig") -> Iterator[Problem]:
    names = [*section.terms, *(["overlong"] if config.algorithm.overlong and name == "reward" else [])]
    for twice in sorted({each for each in names if names.count(each) > 1}):
        text = f"two functions are called {twice!r}; give each its own `name`, because metrics carry it"
        yield _wrong(f"{name}.functions", text)
    grouped = [function.name or function.use for function in section.functions if function.group]
    if grouped and name == "reward" and config.algorithm.advantage == "greedy":
        text = (
            f"{grouped[0]} scores the members of a group together, and a greedy answer is scored alone: write a "
            "function that takes a single sample, or another advantage"
        )
        yield _wrong(f"{name}.functions algorithm.advantage", text)


def _deadline_rules(config: "Config") -> Iterator[Problem]:
    scored = {f"{name}.deadline": section.deadline for name, section in scored_sections(config).items()}
    limit = config.fleet.call_deadline
    for key, seconds in {"generation.deadline": config.generation.deadline, **scored}.items():
        if seconds > limit:
            text = f"a call is given up after {limit:g} s, so {seconds:g} s are never reached; write {limit:g} or less"
            yield _wrong(f"{key} fleet.call_deadline", text)
