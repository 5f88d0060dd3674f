"""Parts of an algorithm that do not fit together: above all, corrections that would count the staleness twice."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from asyncrl.algorithms.presets import DEFAULT_BOUNDS, PRESETS, STANDARDIZING
from asyncrl.contradiction import Contradiction

if TYPE_CHECKING:
    from asyncrl.config import Algorithm, Config

WITHOUT_BOUNDS = ("m2po", "sapo")
"""Losses that do not read clip_low and clip_high but for a KL's weight."""

ROW_RATIOS = ("gspo", "gmpo")
"""Losses with one ratio a row, which is the mean over its tokens of what each adds."""


TRIED_REJECTIONS = {("rejection_low", "geometric"): 0.9, ("rejection_high", "geometric"): 1.11}
TRIED_DIVERGENCE = 0.05
"""Bounds of the rejections in docs/learning.md; nats, where it is by a divergence."""


def _only_with(config: "Config") -> Iterator[Contradiction]:
    """Values that nothing would read, and those without which a part cannot work."""
    a = config.algorithm
    standardizing, weighted = a.advantage in STANDARDIZING, a.correction != "none"
    needs = (
        ("normalize_std", a.normalize_std, "advantage", standardizing, True),
        ("second_moment", a.second_moment, "loss", a.loss == "m2po", True),
        ("gate_temperatures", a.gate_temperatures, "loss", a.loss == "sapo", True),
        ("gamma", a.gamma, "advantage", a.advantage == "gae", True),
        ("gae_lambda", a.gae_lambda, "advantage", a.advantage == "gae", True),
        ("dual_clip", a.dual_clip, "loss", a.loss == "clip", False),
        ("divisor", a.divisor, "aggregation", a.aggregation == "constant", False),
        ("kl_target", a.kl_target, "kl", a.kl > 0, False),
        ("weight_cap", a.weight_cap, "correction", weighted or a.old_logprobs == "engine", weighted),
        ("weight_floor", a.weight_floor, "correction", a.correction == "mask", True),
        ("rejection_low", a.rejection_low, "rejection", a.rejection == "geometric", True),
        ("rejection_high", a.rejection_high, "rejection", a.rejection != "none", True),
    )
    for key, value, other, used, needed in needs:
        keys = (f"algorithm.{key}", f"algorithm.{other}")
        if value is not None and not used:
            yield Contradiction(keys, _unread(a.preset, key, value, f"{other} = {_written(getattr(a, other))}"))
        if value is None and used and needed:
            needing = getattr(a, other)
            yield Contradiction(keys, f"{other} = {_written(needing)} needs it: {_example(key, needing)}")


def _without_effect(config: "Config") -> Iterator[Contradiction]:
    """Values that were written and that nothing reads."""
    a = config.algorithm
    if a.correction == "none" and a.correction_level != "token":
        yield Contradiction(
            ("algorithm.correction_level", "algorithm.correction"),
            "there is no correction of which it could be the level: remove it, or write correction = "
            '"cap" or "mask" and old_logprobs = "recomputed"',
        )
    judges = {"reward": config.reward} | ({"cost": config.cost} if a.constraint != "none" else {})
    for name, section in judges.items():
        if not section.model and section.weight != type(section).model_fields["weight"].default:
            yield Contradiction(
                (f"{name}.weight", f"{name}.model"),
                "it is the weight of a model, and there is none: remove it; a function has a weight of its own",
            )


def _bounds_of_one(config: "Config") -> Iterator[Contradiction]:
    """Bounds that were written for a ratio that is 1; under another loss than the preset's they have to be."""
    a = config.algorithm
    if a.old_logprobs != "recomputed" or config.training.updates > 1 or a.loss != PRESETS[a.preset].parts["loss"]:
        return
    for key in _changed(a, "clip_low", "clip_high", "dual_clip"):
        yield Contradiction(
            (f"algorithm.{key}", "algorithm.old_logprobs", "training.updates"),
            "the ratio to recomputed log-probs is 1 in the first update of a step, and there is no other, so it bounds "
            'nothing: write training.updates = 2 or more, or old_logprobs = "engine", or remove it',
        )


def _example(key: str, needing: str) -> str:
    """What to write for a key that cannot be left out. needing: the value that needs it."""
    if key in ("rejection_low", "rejection_high"):
        tried = TRIED_REJECTIONS.get((key, needing), TRIED_DIVERGENCE)
        return f"write {key} = {tried}, say; docs/corrections.md has what the bounds are of"
    if key == "normalize_std":
        return "write true or false"
    if key in DEFAULT_BOUNDS.get(needing, {}):
        off = "; 0 is no floor" if key == "weight_floor" else ""
        return f"remove the line, for {DEFAULT_BOUNDS[needing][key]:g}, or write a number{off}"
    preset, value = next((name, each.parts[key]) for name, each in PRESETS.items() if key in each.parts)
    return f'write {key} = {_written(value)}, or preset = "{preset}", which brings it'


def _unread(preset: str, key: str, value: object, found: str) -> str:
    """Why a value that nothing reads is a mistake; one that only the preset brings cannot be removed."""
    if PRESETS[preset].parts.get(key) != value:
        return f"nothing reads it with {found}: remove it"
    return (
        f'preset = "{preset}" brings {key} = {_written(value)}, which nothing reads with {found}: write another preset '
        "under it, or leave that as the preset has it"
    )


def _written(value: object) -> str:
    """As in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)


def _taken_back(config: "Config") -> Iterator[Contradiction]:
    """A written config leaves out what is none, and the preset would bring it again."""
    a = config.algorithm
    for key, value in PRESETS[a.preset].parts.items():
        if getattr(a, key) is None:
            yield Contradiction(
                (f"algorithm.{key}", "algorithm.preset"),
                f'preset = "{a.preset}" is {key} = {_written(value)}, which cannot be taken back: write another preset '
                "under your values, or remove the line",
            )


def _counted_twice(config: "Config") -> Iterator[Contradiction]:
    a = config.algorithm
    if a.old_logprobs == "engine" and (a.correction != "none" or a.weight_cap is not None):
        brought = "correction" in PRESETS[a.preset].parts
        without = 'write correction = "none"' if brought else "remove correction and weight_cap"
        yield Contradiction(
            ("algorithm.correction", "algorithm.weight_cap", "algorithm.old_logprobs"),
            'with "engine" the ratio in the loss is current / behaviour already; a weight beside it would count the '
            f'staleness twice: {without}, or write old_logprobs = "recomputed"',
        )
    if a.loss == "m2po" and a.old_logprobs != "engine":
        yield Contradiction(
            ("algorithm.loss", "algorithm.old_logprobs"),
            "m2po bounds the ratio current / behaviour itself; another correction would count the staleness twice: "
            'write old_logprobs = "engine"',
        )
    if a.loss == "m2po" and a.rejection != "none":
        yield Contradiction(
            ("algorithm.loss", "algorithm.rejection"),
            "both leave out what is furthest from the sampler, so it would be counted twice: remove the rejection",
        )
    level = "token" if a.rejection.startswith("token") else "sequence"
    if a.correction == "mask" and a.rejection != "none" and a.correction_level == level:
        yield Contradiction(
            ("algorithm.correction", "algorithm.rejection"),
            f"both leave out each {level} whose proximal / behaviour is extreme, so it would be counted twice: "
            'write correction = "cap" or rejection = "none"',
        )


def _bounds(config: "Config") -> Iterator[Contradiction]:
    a = config.algorithm
    if a.weight_cap is not None and a.weight_cap < 1 and a.correction != "none":
        yield Contradiction(
            ("algorithm.weight_cap", "algorithm.correction"),
            "the weight is 1 for a fresh token, so a cap under 1 scales or leaves out all tokens alike and corrects "
            "nothing; write 1 or more",
        )
    if a.weight_floor is not None and a.weight_floor > 1:
        yield Contradiction(
            ("algorithm.weight_floor",), "the weight is 1 for a fresh token, which would be left out; write 1 or less"
        )
    if a.rejection_low is not None and a.rejection_high is not None and not a.rejection_low < 1 < a.rejection_high:
        yield Contradiction(
            ("algorithm.rejection_low", "algorithm.rejection_high"),
            "the ratio is 1 for a fresh answer, which would be left out; write one under and one over 1",
        )
    if a.dual_clip is not None and a.dual_clip <= 1 + a.clip_high:
        yield Contradiction(
            ("algorithm.dual_clip", "algorithm.clip_high"),
            "the second bound lies beyond the first; write more than 1 + clip_high (usually 3)",
        )


def _bounds_of_another_loss(config: "Config") -> Iterator[Contradiction]:
    """Bounds that nobody wrote are in the unit of the preset's own loss: of tokens, of rows, of logarithms."""
    a, parts = config.algorithm, PRESETS[config.algorithm.preset].parts
    if a.loss in (parts["loss"], *WITHOUT_BOUNDS):
        return
    brought = {key: parts.get(key, type(a).model_fields[key].default) for key in ("clip_low", "clip_high")}
    unwritten = [key for key in brought if key in parts or key not in a.model_fields_set]
    if kept := [key for key in unwritten if getattr(a, key) == brought[key]]:
        yield Contradiction(
            ("algorithm.preset", "algorithm.loss"),
            f'preset = "{a.preset}" brings {" and ".join(f"{key} = {brought[key]:g}" for key in kept)}, meant for '
            f'loss = "{parts["loss"]}"; with loss = "{a.loss}" write bounds of your own, or a preset of that loss',
        )


def _bounds_without_a_reader(config: "Config") -> Iterator[Contradiction]:
    a = config.algorithm
    if reads_bounds(a):
        return
    for key in _changed(a, "clip_low", "clip_high"):
        found = f"loss = {_written(a.loss)} and no KL in the loss"
        yield Contradiction((f"algorithm.{key}", "algorithm.loss"), _unread(a.preset, key, getattr(a, key), found))


def reads_bounds(algorithm: "Algorithm") -> bool:
    """Whether clip_low and clip_high say anything: of the loss, or of a KL's weight in it."""
    return algorithm.loss not in WITHOUT_BOUNDS or (algorithm.kl > 0 and algorithm.kl_in == "loss")


def _changed(algorithm: "Algorithm", *keys: str) -> list[str]:
    """Keys whose values are neither their defaults nor the preset's."""
    fields, parts = type(algorithm).model_fields, PRESETS[algorithm.preset].parts
    return [key for key in keys if getattr(algorithm, key) not in (fields[key].default, parts.get(key))]


def _signal(config: "Config") -> Iterator[Contradiction]:
    a = config.algorithm
    if a.dynamic_sampling and a.advantage in ("batch", "gae"):
        yield Contradiction(
            ("algorithm.dynamic_sampling", "algorithm.advantage"),
            f'advantage = "{a.advantage}" compares with more than the group, so equal rewards are a signal too, and '
            "dropping them would take what is learnt from all right or all wrong: remove dynamic_sampling",
        )


def _critic(config: "Config") -> Iterator[Contradiction]:
    a = config.algorithm
    if a.advantage != "gae":
        if given := sorted(config.critic.model_dump(exclude_defaults=True)):
            yield Contradiction(
                (*(f"critic.{key}" for key in given), "algorithm.advantage"),
                f'nothing reads it: advantage = "{a.advantage}" has no critic; remove it, or write preset = "ppo"',
            )
        return
    if a.loss == "gmpo":
        yield Contradiction(
            ("algorithm.loss", "algorithm.advantage"),
            "gmpo bounds a row by the sign of its advantage, and a critic gives each token one of its own: write "
            'loss = "clip" or "gspo"',
        )
    if a.kl_target is not None and a.kl_in == "reward":
        yield Contradiction(
            ("algorithm.kl_target", "algorithm.kl_in", "algorithm.advantage"),
            "the KL is part of the rewards that policy and critic both learn from, so its coefficient is fixed: remove "
            'kl_target, or write kl_in = "loss" with kl_estimator = "k2"',
        )


def _costs(config: "Config") -> Iterator[Contradiction]:
    a, key = config.algorithm, "algorithm.constraint"
    if a.constraint == "none":
        written = ((name, getattr(config, name).model_dump(exclude_defaults=True)) for name in ("cost", "cost_critic"))
        if given := [f"{section}.{name}" for section, values in written for name in sorted(values)]:
            yield Contradiction(
                (*given, key), 'nothing reads it with constraint = "none"; remove it, or write preset = "safe_rlhf"'
            )
        return
    if a.advantage != "gae":
        yield Contradiction(
            (key, "algorithm.advantage"),
            f'costs are held under their limit with what critics say, and advantage = "{a.advantage}" has none: write '
            'preset = "safe_rlhf"',
        )
        return
    if not config.cost.functions and not config.cost.model:
        yield Contradiction(
            ("cost.functions", "cost.model", key),
            "nothing says what an answer costs: write cost.functions, cost.model or both",
        )
    if config.cost.limit is None:
        yield Contradiction(("cost.limit", key), "costs are held under it: write the largest mean cost of an answer")
    if config.cost.multiplier > config.cost.multiplier_max:
        yield Contradiction(
            ("cost.multiplier", "cost.multiplier_max"),
            f"the multiplier would begin above its bound, cost.multiplier_max = {config.cost.multiplier_max:g}; begin "
            "lower, or write a higher bound",
        )
    if a.shuffle_advantages:
        yield Contradiction(
            ("algorithm.shuffle_advantages", key), "only rewards are shuffled, and costs would be learnt: remove one"
        )


def _pretraining(config: "Config") -> Iterator[Contradiction]:
    keys, coefficient = ("algorithm.pretrain_coefficient", "task.pretrain"), config.algorithm.pretrain_coefficient
    if coefficient > 0 and not config.task.pretrain:
        yield Contradiction(keys, "there are no texts for it: write task.pretrain, a source of rows with a `text`")
    if coefficient == 0 and config.task.pretrain:
        yield Contradiction(keys, "nothing reads these texts: write pretrain_coefficient, or remove task.pretrain")
    if coefficient > 0 and config.task.pretrain_per_step < config.training.updates:
        yield Contradiction(
            ("task.pretrain_per_step", "training.updates"),
            f"each of {config.training.updates} updates takes a share of the texts of a step; write as many or more",
        )


def _levels(config: "Config") -> Iterator[Contradiction]:
    a = config.algorithm
    if a.loss == "gmpo" and a.kl > 0 and a.kl_in == "reward":
        yield Contradiction(
            ("algorithm.loss", "algorithm.kl_in"),
            "gmpo bounds a row by the sign of its advantage, and a KL in the reward gives each token one of its own: "
            'write kl_in = "loss" with kl_estimator = "k2"',
        )
    if a.loss in ROW_RATIOS and a.aggregation != "sequence_mean_token_mean":
        yield Contradiction(
            ("algorithm.loss", "algorithm.aggregation"),
            f"{a.loss} has one term a sequence, of which every token carries a part; "
            'write aggregation = "sequence_mean_token_mean"',
        )


def _kl(config: "Config") -> Iterator[Contradiction]:
    algorithm = config.algorithm
    if algorithm.kl > 0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield Contradiction(
            ("algorithm.kl_estimator", "algorithm.kl_in"),
            "k1 as a loss has zero expected gradient, and k3 as a loss is a biased approximation; "
            'right are k2 in the loss and k1 with kl_in = "reward"',
        )
    if algorithm.kl > 0 and algorithm.kl_in == "reward" and algorithm.kl_estimator != "k1":
        yield Contradiction(
            ("algorithm.kl_in", "algorithm.kl_estimator"),
            f"in the reward only k1 has the gradient of the KL, {algorithm.kl_estimator} has another one: "
            'write kl_estimator = "k1", or kl_in = "loss" with k2',
        )


def _thresholds(config: "Config") -> Iterator[Contradiction]:
    m = config.mismatch
    if m.warn_kl is not None and m.stop_kl is not None and m.warn_kl >= m.stop_kl:
        yield Contradiction(("mismatch.warn_kl", "mismatch.stop_kl"), "the run would end before it warns; warn earlier")
    if m.warn_ess is not None and m.stop_ess is not None and m.warn_ess <= m.stop_ess:
        yield Contradiction(
            ("mismatch.warn_ess", "mismatch.stop_ess"), "the run would end before it warns; warn earlier"
        )


ALGORITHM_RULES: tuple[Callable[["Config"], Iterator[Contradiction]], ...] = (
    _only_with,
    _taken_back,
    _without_effect,
    _bounds_of_one,
    _counted_twice,
    _bounds,
    _bounds_of_another_loss,
    _bounds_without_a_reader,
    _signal,
    _critic,
    _costs,
    _pretraining,
    _levels,
    _kl,
    _thresholds,
)
