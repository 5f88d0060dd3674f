"""Rules about parts of an algorithm that do not fit together, above all corrections that count the staleness twice."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.config.presets import DEFAULT_BOUNDS, PRESETS, STANDARDIZING
from asyncrl.config.problems import Problem, Rule

if TYPE_CHECKING:
    from asyncrl.config.schema import AlgorithmConfig, Config

WITHOUT_BOUNDS = ("m2po", "sapo")
"""Losses that read clip_low and clip_high only for the weight of a KL."""

ROW_RATIOS = ("gspo", "gmpo")
"""Losses with one ratio a sequence, the mean over its tokens."""

TRIED_REJECTIONS = {("rejection_low", "geometric"): 0.9, ("rejection_high", "geometric"): 1.11}
TRIED_DIVERGENCE = 0.05
"""Bounds of the rejections in docs/learning.md; those on a divergence are in nats."""


class OptionalKey(NamedTuple):
    """A key without a default that one part of an algorithm reads.

    other: key that chooses the part. used: whether the part is chosen. required: the part does not work without it.
    """

    key: str
    other: str
    used: Callable[["AlgorithmConfig"], bool]
    required: bool = True


OPTIONAL_KEYS = (
    OptionalKey("normalize_std", "advantage", lambda a: a.advantage in STANDARDIZING),
    OptionalKey("second_moment", "loss", lambda a: a.loss == "m2po"),
    OptionalKey("gate_temperatures", "loss", lambda a: a.loss == "sapo"),
    OptionalKey("gamma", "advantage", lambda a: a.advantage == "gae"),
    OptionalKey("gae_lambda", "advantage", lambda a: a.advantage == "gae"),
    OptionalKey("dual_clip", "loss", lambda a: a.loss == "clip", required=False),
    OptionalKey("divisor", "aggregation", lambda a: a.aggregation == "constant", required=False),
    OptionalKey("kl_target", "kl", lambda a: a.kl > 0, required=False),
    OptionalKey("weight_cap", "correction", lambda a: a.correction != "none"),
    OptionalKey("weight_floor", "correction", lambda a: a.correction == "mask"),
    OptionalKey("rejection_low", "rejection", lambda a: a.rejection == "geometric"),
    OptionalKey("rejection_high", "rejection", lambda a: a.rejection != "none"),
)


def reads_bounds(algorithm: "AlgorithmConfig") -> bool:
    """Returns whether the loss, or a KL in the loss, reads clip_low and clip_high."""
    return algorithm.loss not in WITHOUT_BOUNDS or (algorithm.kl > 0 and algorithm.kl_in == "loss")


def _weight_beside_ratio(config: "Config") -> bool:
    a = config.algorithm
    return a.old_logprobs == "engine" and (a.correction != "none" or a.weight_cap is not None)


COUNTED_TWICE = (
    'with "engine" the ratio in the loss is current / behaviour already; a weight beside it would count the staleness '
    'twice: {}, or write old_logprobs = "recomputed"'
)

ALGORITHM_RULES = (
    Rule(
        "algorithm.correction_level algorithm.correction",
        lambda c: c.algorithm.correction == "none" and c.algorithm.correction_level != "token",
        'nothing reads it with correction = "none": remove it, or write correction = "cap" or "mask" and old_logprobs '
        '= "recomputed"',
        is_warning=True,
    ),
    Rule(
        "algorithm.correction algorithm.weight_cap algorithm.old_logprobs",
        lambda c: _weight_beside_ratio(c) and "correction" in PRESETS[c.algorithm.preset].parts,
        COUNTED_TWICE.format('write correction = "none"'),
    ),
    Rule(
        "algorithm.correction algorithm.weight_cap algorithm.old_logprobs",
        lambda c: _weight_beside_ratio(c) and "correction" not in PRESETS[c.algorithm.preset].parts,
        COUNTED_TWICE.format("remove correction and weight_cap"),
    ),
    Rule(
        "algorithm.loss algorithm.old_logprobs",
        lambda c: c.algorithm.loss == "m2po" and c.algorithm.old_logprobs != "engine",
        "m2po bounds the ratio current / behaviour itself; another correction would count the staleness twice: "
        'write old_logprobs = "engine"',
    ),
    Rule(
        "algorithm.loss algorithm.rejection",
        lambda c: c.algorithm.loss == "m2po" and c.algorithm.rejection != "none",
        "both leave out what is furthest from the sampler, so it would be counted twice: remove the rejection",
    ),
    Rule(
        "algorithm.correction algorithm.rejection",
        lambda c: (
            c.algorithm.correction == "mask"
            and c.algorithm.rejection != "none"
            and c.algorithm.rejection.startswith("token") == (c.algorithm.correction_level == "token")
        ),
        "both leave out each {a.correction_level} whose proximal / behaviour is extreme, so it would be counted twice: "
        'write correction = "cap" or rejection = "none"',
    ),
    Rule(
        "algorithm.weight_cap algorithm.correction",
        lambda c: (c.algorithm.weight_cap or 1) < 1 and c.algorithm.correction != "none",
        "the weight is 1 for a fresh token, so a cap under 1 scales or leaves out all tokens alike and corrects "
        "nothing; write 1 or more",
    ),
    Rule(
        "algorithm.weight_floor",
        lambda c: (c.algorithm.weight_floor or 0) > 1,
        "the weight is 1 for a fresh token, which would be left out; write 1 or less",
    ),
    Rule(
        "algorithm.rejection_low algorithm.rejection_high",
        lambda c: (
            c.algorithm.rejection == "geometric"
            and not (c.algorithm.rejection_low or 0) < 1 < (c.algorithm.rejection_high or 2)
        ),
        "the ratio is 1 for a fresh answer, which would be left out; write one under and one over 1",
    ),
    Rule(
        "algorithm.dual_clip algorithm.clip_high",
        lambda c: c.algorithm.dual_clip is not None and c.algorithm.dual_clip <= 1 + c.algorithm.clip_high,
        "the second bound must lie beyond the first one; write more than 1 + clip_high (usually 3)",
    ),
    Rule(
        "algorithm.dynamic_sampling algorithm.advantage",
        lambda c: c.algorithm.dynamic_sampling and c.algorithm.advantage in ("batch", "gae"),
        'advantage = "{a.advantage}" compares with more than the group, so equal rewards are a signal too, and '
        "dropping them would take away what is learnt from groups that are all right or all wrong: remove "
        "dynamic_sampling",
    ),
    Rule(
        "algorithm.loss algorithm.advantage",
        lambda c: c.algorithm.advantage == "gae" and c.algorithm.loss == "gmpo",
        "gmpo bounds a row by the sign of its advantage, and a critic gives each token an advantage of its own: write "
        'loss = "clip" or "gspo"',
    ),
    Rule(
        "algorithm.kl_target algorithm.kl_in algorithm.advantage",
        lambda c: (
            c.algorithm.advantage == "gae" and c.algorithm.kl_target is not None and c.algorithm.kl_in == "reward"
        ),
        "the KL is part of the rewards that policy and critic both learn from, so its coefficient is fixed: remove "
        'kl_target, or write kl_in = "loss" with kl_estimator = "k2"',
    ),
    Rule(
        "algorithm.constraint algorithm.advantage",
        lambda c: c.algorithm.constraint != "none" and c.algorithm.advantage != "gae",
        'costs are held under their limit with values of critics, and advantage = "{a.advantage}" has no critic: write '
        'preset = "safe_rlhf"',
    ),
    Rule(
        "cost.functions cost.model algorithm.constraint",
        lambda c: _constrained(c) and not c.cost.functions and not c.cost.model,
        "there is no cost of an answer: write cost.functions, cost.model or both",
    ),
    Rule(
        "cost.limit algorithm.constraint",
        lambda c: _constrained(c) and c.cost.limit is None,
        "costs are held under it: write the largest mean cost of an answer",
    ),
    Rule(
        "cost.multiplier cost.multiplier_max",
        lambda c: _constrained(c) and c.cost.multiplier > c.cost.multiplier_max,
        "the multiplier would begin above its bound, cost.multiplier_max = {c.cost.multiplier_max:g}; begin lower, or "
        "write a higher bound",
    ),
    Rule(
        "algorithm.shuffle_advantages algorithm.constraint",
        lambda c: _constrained(c) and c.algorithm.shuffle_advantages,
        "only rewards are shuffled, and costs would be learnt: remove one",
    ),
    Rule(
        "algorithm.pretrain_coefficient task.pretrain",
        lambda c: c.algorithm.pretrain_coefficient > 0 and not c.task.pretrain,
        "there are no texts for it: write task.pretrain, a source of rows with a `text`",
    ),
    Rule(
        "algorithm.pretrain_coefficient task.pretrain",
        lambda c: c.algorithm.pretrain_coefficient == 0 and bool(c.task.pretrain),
        "these texts would not be learnt: write pretrain_coefficient, or remove task.pretrain",
    ),
    Rule(
        "task.pretrain_per_step training.updates",
        lambda c: c.algorithm.pretrain_coefficient > 0 and c.task.pretrain_per_step < c.training.updates,
        "each of {c.training.updates} updates takes a share of the texts of a step; write as many or more",
    ),
    Rule(
        "algorithm.loss algorithm.kl_in",
        lambda c: c.algorithm.loss == "gmpo" and c.algorithm.kl > 0 and c.algorithm.kl_in == "reward",
        "gmpo bounds a row by the sign of its advantage, and a KL in the reward gives each token an advantage of its "
        'own: write kl_in = "loss" with kl_estimator = "k2"',
    ),
    Rule(
        "algorithm.loss algorithm.aggregation",
        lambda c: c.algorithm.loss in ROW_RATIOS and c.algorithm.aggregation != "sequence_mean_token_mean",
        "{a.loss} has one term a sequence, of which every token carries a part; "
        'write aggregation = "sequence_mean_token_mean"',
    ),
    Rule(
        "algorithm.kl_estimator algorithm.kl_in",
        lambda c: c.algorithm.kl > 0 and c.algorithm.kl_in == "loss" and c.algorithm.kl_estimator == "k1",
        "k1 as a loss has zero expected gradient, and k3 as a loss is a biased approximation; "
        'right are k2 in the loss and k1 with kl_in = "reward"',
    ),
    Rule(
        "algorithm.kl_in algorithm.kl_estimator",
        lambda c: c.algorithm.kl > 0 and c.algorithm.kl_in == "reward" and c.algorithm.kl_estimator != "k1",
        "in the reward only k1 has the gradient of the KL, {a.kl_estimator} has another one: "
        'write kl_estimator = "k1", or kl_in = "loss" with k2',
    ),
    Rule(
        "mismatch.warn_kl mismatch.stop_kl",
        lambda c: (c.mismatch.warn_kl or 0) >= (c.mismatch.stop_kl or float("inf")),
        "the run would end before it warns; write a smaller warn_kl",
        is_warning=True,
    ),
    Rule(
        "mismatch.warn_ess mismatch.stop_ess",
        lambda c: (c.mismatch.warn_ess or 1) <= (c.mismatch.stop_ess or 0),
        "the run would end before it warns; write a larger warn_ess",
        is_warning=True,
    ),
)


def _constrained(config: "Config") -> bool:
    return config.algorithm.constraint != "none" and config.algorithm.advantage == "gae"


def _check_optional_keys(config: "Config") -> Iterator[Problem]:
    """Finds values that nothing reads, and values that a part needs and lacks."""
    a = config.algorithm
    for key, other, used, required in OPTIONAL_KEYS:
        value, chosen = getattr(a, key), getattr(a, other)
        if value is not None and not used(a):
            yield _unread(a.preset, key, value, other, f"{other} = {_toml(chosen)}")
        if value is None and used(a) and required:
            text = f"{other} = {_toml(chosen)} needs it: {_example(key, chosen)}"
            yield Problem(f"algorithm.{key}", "", text, (f"algorithm.{other}",))


def _check_removed_parts(config: "Config") -> Iterator[Problem]:
    """Finds parts of the preset that are none: a written config leaves them out, and the preset brings them again."""
    a = config.algorithm
    for key, value in PRESETS[a.preset].parts.items():
        if getattr(a, key) is None:
            text = (
                f'preset = "{a.preset}" is {key} = {_toml(value)}, which cannot be taken back: write another preset '
                "under your values, or remove the line"
            )
            yield Problem(f"algorithm.{key}", "", text, ("algorithm.preset",))


def _check_unread_bounds(config: "Config") -> Iterator[Problem]:
    """Finds bounds without a reader, and bounds of a ratio that is always 1."""
    a = config.algorithm
    if not reads_bounds(a):
        for key in _changed(a, "clip_low", "clip_high"):
            with_loss = f"loss = {_toml(a.loss)} and no KL in the loss"
            yield _unread(a.preset, key, getattr(a, key), "loss", with_loss)
        return
    own_loss = a.loss == PRESETS[a.preset].parts["loss"]  # Another loss than the preset's has to have its own bounds.
    if a.old_logprobs == "recomputed" and config.training.updates == 1 and own_loss:
        dual_clip = ("dual_clip",) if a.loss == "clip" else ()
        for key in _changed(a, "clip_low", "clip_high", *dual_clip):
            text = (
                "the ratio to recomputed log-probs is 1 in the first update of a step, and there is no other, so it "
                'bounds nothing: write training.updates = 2 or more, or old_logprobs = "engine", or remove it'
            )
            yield Problem(f"algorithm.{key}", "", text, ("algorithm.old_logprobs", "training.updates"), is_warning=True)


def _check_inherited_bounds(config: "Config") -> Iterator[Problem]:
    """Finds bounds in the unit of the preset's own loss (of tokens, sequences or logarithms) under another loss."""
    a, parts = config.algorithm, PRESETS[config.algorithm.preset].parts
    if a.loss in (parts["loss"], *WITHOUT_BOUNDS):
        return
    brought = {key: parts.get(key, type(a).model_fields[key].default) for key in ("clip_low", "clip_high")}
    unwritten = [key for key in brought if key in parts or key not in a.model_fields_set]
    if inherited := [key for key in unwritten if getattr(a, key) == brought[key]]:
        values = " and ".join(f"{key} = {brought[key]:g}" for key in inherited)
        text = (
            f'preset = "{a.preset}" brings {values}, meant for loss = "{parts["loss"]}"; with loss = "{a.loss}" '
            "write bounds of your own, or a preset of that loss"
        )
        yield Problem("algorithm.preset", "", text, ("algorithm.loss",))


def _check_unread_sections(config: "Config") -> Iterator[Problem]:
    """Finds keys of critics, costs and models that do not exist. Costs are refused: they say what not to learn."""
    a = config.algorithm
    if a.advantage != "gae" and (given := _given(config, "critic")):
        text = f'nothing reads it: advantage = "{a.advantage}" has no critic; remove it, or write preset = "ppo"'
        yield Problem(given[0], "", text, (*given[1:], "algorithm.advantage"), is_warning=True)
    if a.constraint == "none" and (given := _given(config, "cost") + _given(config, "cost_critic")):
        text = 'nothing reads it with constraint = "none"; remove it, or write preset = "safe_rlhf"'
        yield Problem(given[0], "", text, (*given[1:], "algorithm.constraint"))
    scorers = {"reward": config.reward} | ({"cost": config.cost} if a.constraint != "none" else {})
    for name, section in scorers.items():
        if not section.model and section.weight != type(section).model_fields["weight"].default:
            text = "nothing reads it without a model: remove it; a function has a weight of its own"
            yield Problem(f"{name}.weight", "", text, (f"{name}.model",), is_warning=True)


ALGORITHM_CHECKS: tuple[Callable[["Config"], Iterator[Problem]], ...] = (
    _check_optional_keys,
    _check_removed_parts,
    _check_unread_bounds,
    _check_inherited_bounds,
    _check_unread_sections,
)
"""Checks whose keys depend on the config."""


def _given(config: "Config", section: str) -> list[str]:
    """Returns the keys of a section that are not at their defaults."""
    return [f"{section}.{key}" for key in sorted(getattr(config, section).model_dump(exclude_defaults=True))]


def _changed(algorithm: "AlgorithmConfig", *keys: str) -> list[str]:
    """Returns the keys whose values are neither their defaults nor the preset's."""
    fields, parts = type(algorithm).model_fields, PRESETS[algorithm.preset].parts
    return [key for key in keys if getattr(algorithm, key) not in (fields[key].default, parts.get(key))]


def _example(key: str, chosen: str) -> str:
    """Returns what to write for a required key. chosen: the value that needs the key."""
    if key in ("rejection_low", "rejection_high"):
        tried = TRIED_REJECTIONS.get((key, chosen), TRIED_DIVERGENCE)
        return f"write for example {key} = {tried}; docs/corrections.md explains the bounds"
    if key == "normalize_std":
        return "write true or false"
    if key in DEFAULT_BOUNDS.get(chosen, {}):
        off = "; 0 is no floor" if key == "weight_floor" else ""
        return f"remove the line, for {DEFAULT_BOUNDS[chosen][key]:g}, or write a number{off}"
    preset, value = next((name, each.parts[key]) for name, each in PRESETS.items() if key in each.parts)
    return f'write {key} = {_toml(value)}, or preset = "{preset}", which brings it'


def _unread(preset: str, key: str, value: object, other: str, chosen: str) -> Problem:
    """Returns the warning about a value that nothing reads; a value that the preset brings cannot be removed."""
    text = f"nothing reads it with {chosen}: remove it"
    if PRESETS[preset].parts.get(key) == value:
        text = (
            f'preset = "{preset}" brings {key} = {_toml(value)}, which nothing reads with {chosen}: write another '
            f"preset under it, or leave {other} as the preset has it"
        )
    return Problem(f"algorithm.{key}", "", text, (f"algorithm.{other}",), is_warning=True)


def _toml(value: object) -> str:
    """Returns a value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)
