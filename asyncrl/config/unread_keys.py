"""Finds keys that nothing reads, which is a warning, and keys that a chosen part of the algorithm needs and lacks."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.config.contradictions import scored_sections
from asyncrl.config.presets import DEFAULT_BOUNDS, PRESETS, STANDARDIZING
from asyncrl.config.problems import Problem
from asyncrl.config.toml_writer import value_text

if TYPE_CHECKING:
    from asyncrl.config.schema import AlgorithmConfig, Config

WITHOUT_BOUNDS = ("m2po", "sapo")
"""Losses that read clip_low and clip_high only for the weight of a KL."""

TRIED_REJECTIONS = {("rejection_low", "geometric"): 0.9, ("rejection_high", "geometric"): 1.11}
TRIED_DIVERGENCE = 0.05
"""Bounds of the rejections in docs/learning.md; those on a divergence are in nats."""


class OptionalKey(NamedTuple):
    """A key without a default that one part of an algorithm reads.

    other: key that chooses the part. used: whether the part is chosen. required: the part does not work without it.
    """

    key: str
    other: str
    used: "Callable[[AlgorithmConfig], bool]"
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


def unread_problems(config: "Config") -> Iterator[Problem]:
    """Yields a warning for each value that nothing reads, and a problem for each that a chosen part needs and lacks."""
    yield from _unread_values(config)
    yield from _optional_keys(config.algorithm)
    yield from _removed_parts(config.algorithm)
    yield from _unread_bounds(config)
    yield from _inherited_bounds(config.algorithm)
    yield from _unread_sections(config)


def reads_bounds(algorithm: "AlgorithmConfig") -> bool:
    """Returns whether the loss, or a KL in the loss, reads clip_low and clip_high."""
    return algorithm.loss not in WITHOUT_BOUNDS or (algorithm.kl > 0 and algorithm.kl_in == "loss")


def unread_algorithm_keys(algorithm: "AlgorithmConfig") -> set[str]:
    """Returns the keys of the section that nothing reads with the values of its other keys."""
    return {
        *(("kl_in", "kl_estimator") if algorithm.kl == 0 else ()),
        *(() if reads_bounds(algorithm) else ("clip_low", "clip_high")),
        *(("correction_level",) if algorithm.correction == "none" else ()),
    }


def _warning(text: str, key: str, *others: str) -> Problem:
    return Problem(key, "", text, others, is_warning=True)


def _unread_values(config: "Config") -> Iterator[Problem]:
    staleness, mismatch, a = config.staleness, config.mismatch, config.algorithm
    if isinstance(staleness.cut_at, int) and staleness.policy != "mask":
        text = f'nothing reads it with policy = "{staleness.policy}", because only "mask" cuts groups: remove it'
        yield _warning(text, "staleness.cut_at", "staleness.policy")
    if a.correction == "none" and a.correction_level != "token":
        text = (
            'nothing reads it with correction = "none": remove it, or write correction = "cap" or "mask" and '
            'old_logprobs = "recomputed"'
        )
        yield _warning(text, "algorithm.correction_level", "algorithm.correction")
    if config.model.float32_head and config.model.dtype == config.training.precision == "float32":
        text = "it changes nothing, because everything is computed in float32 already: remove float32_head"
        yield _warning(text, "model.float32_head", "model.dtype", "training.precision")
    if (mismatch.warn_kl or 0) >= (mismatch.stop_kl or float("inf")):
        text = "the run would end before it warns; write a smaller warn_kl"
        yield _warning(text, "mismatch.warn_kl", "mismatch.stop_kl")
    if (mismatch.warn_ess or 1) <= (mismatch.stop_ess or 0):
        text = "the run would end before it warns; write a larger warn_ess"
        yield _warning(text, "mismatch.warn_ess", "mismatch.stop_ess")


def _optional_keys(a: "AlgorithmConfig") -> Iterator[Problem]:
    for key, other, used, required in OPTIONAL_KEYS:
        value, part = getattr(a, key), f"{other} = {value_text(getattr(a, other))}"
        if value is not None and not used(a):
            yield _unread(a.preset, key, value, other, part)
        if value is None and used(a) and required:
            text = f"{part} needs it: {_example(key, getattr(a, other))}"
            yield Problem(f"algorithm.{key}", "", text, (f"algorithm.{other}",))


def _removed_parts(a: "AlgorithmConfig") -> Iterator[Problem]:
    """Finds parts of the preset that are none: a written config leaves them out, and the preset brings them again."""
    for key, value in PRESETS[a.preset].parts.items():
        if getattr(a, key) is None:
            text = (
                f'preset = "{a.preset}" is {key} = {value_text(value)}, which cannot be taken back: write another '
                "preset under your values, or remove the line"
            )
            yield Problem(f"algorithm.{key}", "", text, ("algorithm.preset",))


def _unread_bounds(config: "Config") -> Iterator[Problem]:
    """Finds bounds without a reader, and bounds of a ratio that is always 1."""
    a = config.algorithm
    fields, parts = type(a).model_fields, PRESETS[a.preset].parts
    keys = ("clip_low", "clip_high", *(("dual_clip",) if a.loss == "clip" else ()))
    changed = [key for key in keys if getattr(a, key) not in (fields[key].default, parts.get(key))]
    if not reads_bounds(a):
        for key in changed:
            yield _unread(a.preset, key, getattr(a, key), "loss", f'loss = "{a.loss}" and no KL in the loss')
    # Another loss than the preset's has to have its own bounds.
    elif a.old_logprobs == "recomputed" and config.training.updates == 1 and a.loss == parts["loss"]:
        text = (
            "the ratio to recomputed log-probs is 1 in the first update of a step, and there is no other, so it "
            'bounds nothing: write training.updates = 2 or more, or old_logprobs = "engine", or remove it'
        )
        for key in changed:
            yield _warning(text, f"algorithm.{key}", "algorithm.old_logprobs", "training.updates")


def _inherited_bounds(a: "AlgorithmConfig") -> Iterator[Problem]:
    """Finds bounds in the unit of the preset's own loss (of tokens, sequences or logarithms) under another loss."""
    parts = PRESETS[a.preset].parts
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


def _unread_sections(config: "Config") -> Iterator[Problem]:
    """Finds keys of critics, costs and models that do not exist. Costs are refused: they say what not to learn."""
    a = config.algorithm
    if a.advantage != "gae" and (given := _given(config, "critic")):
        text = f'nothing reads it: advantage = "{a.advantage}" has no critic; remove it, or write preset = "ppo"'
        yield _warning(text, *given, "algorithm.advantage")
    if a.constraint == "none" and (given := _given(config, "cost") + _given(config, "cost_critic")):
        text = 'nothing reads it with constraint = "none"; remove it, or write preset = "safe_rlhf"'
        yield Problem(given[0], "", text, (*given[1:], "algorithm.constraint"))
    for name, section in scored_sections(config).items():
        if not section.model and section.weight != type(section).model_fields["weight"].default:
            text = "nothing reads it without a model: remove it; a function has a weight of its own"
            yield _warning(text, f"{name}.weight", f"{name}.model")


def _given(config: "Config", section: str) -> list[str]:
    """Returns the keys of a section that are not at their defaults."""
    return [f"{section}.{key}" for key in sorted(getattr(config, section).model_dump(exclude_defaults=True))]


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
    return f'write {key} = {value_text(value)}, or preset = "{preset}", which brings it'


def _unread(preset: str, key: str, value: object, other: str, part: str) -> Problem:
    """Returns the warning about a value that nothing reads; a value that the preset brings cannot be removed."""
    text = f"nothing reads it with {part}: remove it"
    if PRESETS[preset].parts.get(key) == value:
        text = (
            f'preset = "{preset}" brings {key} = {value_text(value)}, which nothing reads with {part}: write another '
            f"preset under it, or leave {other} as the preset has it"
        )
    return _warning(text, f"algorithm.{key}", f"algorithm.{other}")
