"""The base of all sections, and the section `[algorithm]` with its presets, whose values a config may override."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from asyncrl.config.sections.named_values import Named

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonEmpty = Annotated[str, Field(min_length=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]

STANDARDIZING = ("group_mean", "gae")
"""Advantages that are divided by a standard deviation unless `normalize_std` is false."""
WITHOUT_BOUNDS = ("m2po", "sapo")
"""Losses that read clip_low and clip_high only for the weight of a KL."""
DUAL_CLIP = 3.0
"""Default of `dual_clip` in the preset grpo: the constant of dual-clip PPO (arXiv 1912.09729) and of verl. Other
presets have the objective of their paper."""
DEFAULT_BOUNDS: Mapping[str, Mapping[str, float]] = {
    "cap": {"weight_cap": 2.0},
    "mask": {"weight_floor": 0.5, "weight_cap": 5.0},
}
"""Default bounds of the weight, by `correction`."""


Value = TypeVar("Value")
CHANGEABLE = "a resume may change it"
MayChange: TypeAlias = Annotated[Value, CHANGEABLE]
"""Marks a key or a section that changes place, speed, length or output of a run, but not what a step learns: a resume
may change it. Other keys may not."""


class Section(BaseModel):
    """Base of all sections: frozen, without unknown keys and without infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Preset:
    """An algorithm of a paper. parts: keys of `[algorithm]` and their values."""

    paper: str
    parts: Mapping[str, Any]


def _presets() -> dict[str, Preset]:
    tables: dict[str, dict[str, Any]] = tomllib.loads((files(__package__) / "presets.toml").read_text("utf-8"))
    for parts in tables.values():
        parts.update({key: tuple(value) for key, value in parts.items() if isinstance(value, list)})
    return {name: Preset(parts.pop("paper"), parts) for name, parts in tables.items()}


PRESETS = _presets()

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]


class AlgorithmConfig(Section):
    """The algorithm: advantage, loss, KL and corrections."""

    preset: PresetName = "grpo"
    """Values for the other keys of this section, which `asyncrl graph` shows."""
    custom: Annotated[str, Named.CODE] = ""
    """Your own algorithm: `FILE.py:NAME`, `module:NAME`, or a file or module with the functions roll_out and train."""
    advantage: Literal["group_mean", "leave_one_out", "batch", "group_batch", "greedy", "gae"] = "group_mean"
    """Baseline of a reward: the mean of its group, that of the others (leave_one_out), mean and deviation of the batch,
    these after the group's mean (group_batch), a greedy answer's reward, or a critic's values (gae)."""
    normalize_std: bool | None = None
    """Divides advantages by a standard deviation: of the group (`group_mean`; ddof 1, eps 1e-4), or of the batch's
    response tokens (`gae`); default: true for both."""
    gamma: Annotated[float, Field(ge=0, le=1)] | None = None
    """Discount per token, with `advantage = "gae"`."""
    turn_discount: Annotated[float, Field(ge=0, le=1)] | None = None
    """Discount by turn: rewards from each turn on are compared with those of the same turn in the group (`group_mean`,
    `leave_one_out`), or come at its end (`gae`)."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | None = None
    """Lambda of generalized advantage estimation; 1 has no bias."""
    constraint: Literal["none", "lagrangian"] = "none"
    """Constraint on costs: `lagrangian` holds their mean under cost.limit and needs `advantage = "gae"`."""
    pretrain_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the mean cross-entropy of task.pretrain in the loss; 0: no such texts."""
    loss: Literal["clip", "gspo", "cispo", "gmpo", "m2po", "sapo"] = "clip"
    """Policy loss; `clip` is that of PPO and GRPO, docs/algorithms/presets.md has the others."""
    clip_low: PositiveFloat = 0.2
    """Bounds the ratio from below by 1 - clip_low (gmpo: its logarithm by -clip_low; m2po and sapo: only in the weight
    of a KL)."""
    clip_high: PositiveFloat = 0.2
    """Bounds the ratio from above by 1 + clip_high (gmpo, m2po, sapo: as clip_low)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio with a negative advantage that has a gradient (`loss = "clip"`); default: 3 with the preset grpo,
    else none. 1e9 bounds nothing, as in GRPO's paper."""
    second_moment: PositiveFloat | None = None
    """Budget of the mean squared log ratio, with `loss = "m2po"`."""
    gate_temperatures: tuple[PositiveFloat, PositiveFloat] | None = None
    """Temperatures for positive and for negative advantages, with `loss = "sapo"`."""
    aggregation: Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"] = (
        "sequence_mean_token_mean"
    )
    """Average of the loss: over response tokens (token_mean), over samples of the sum or mean of their tokens, or the
    sum over samples x divisor (constant)."""
    divisor: Positive | None = None
    """Divisor of `aggregation = "constant"` in tokens; default: generation.max_new_tokens, in episodes
    environment.max_tokens."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL to the reference model; 0 starts no reference service."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """Estimator of the KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL: a term of the loss, or a part of the reward."""
    kl_target: PositiveFloat | None = None
    """KL in nats per token to which an adaptive coefficient steers from `kl`; default: a fixed coefficient."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the policy's mean entropy, subtracted from the loss."""
    old_logprobs: Literal["engine", "recomputed"] = "engine"
    """Denominator of the ratio: log-probs recorded while sampling (engine), or computed by the trainer when the step
    begins (recomputed)."""
    correction: Literal["none", "cap", "mask"] = "none"
    """Treatment of the weight proximal / behaviour: `cap` bounds it, `mask` sets it to 0 outside its bounds. Default
    with `old_logprobs = "recomputed"`, which it needs: cap."""
    correction_level: Literal["token", "sequence"] = "token"
    """Unit of the weight: each token, or the product over the whole answer."""
    weight_cap: PositiveFloat | None = None
    """Largest weight; default: 2 for cap, 5 for mask."""
    weight_floor: Annotated[float, Field(ge=0)] | None = None
    """Smallest weight of mask; default: 0.5; 0: no floor."""
    rejection: Literal["none", "geometric", "token_k2", "token_k3", "sequence_k2", "sequence_k3"] = "none"
    """Leaves out answers whose geometric mean of proximal / behaviour is out of bounds, or tokens or answers whose KL
    estimate is too large."""
    rejection_low: PositiveFloat | None = None
    """Smallest geometric mean, e.g. 0.999."""
    rejection_high: PositiveFloat | None = None
    """Largest geometric mean, e.g. 1.001, or largest KL estimate, e.g. 0.01."""
    mask_truncated: bool = False
    """Leaves samples that generation.max_new_tokens or generation.deadline cut off out of the loss and its
    denominators; they stay in the baseline."""
    overlong: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Last share of generation.max_new_tokens (in episodes of environment.max_tokens) in which an additional reward
    falls from 0 to -1; 0: none."""
    dynamic_sampling: bool = False
    """Drops groups whose rewards are all equal and fills the batch with others."""
    shuffle_advantages: bool = False
    """Permutes the advantages within the batch: a control that must not learn."""

    @model_validator(mode="before")
    @classmethod
    def _preset_under_the_rest(cls, values: Any) -> Any:
        preset = values.get("preset", "grpo") if isinstance(values, dict) else None
        return expanded(values, preset) if isinstance(preset, str) and preset in PRESETS else values

    @property
    def unread_keys(self) -> set[str]:
        """Returns the keys that nothing reads with the values of the other keys."""
        reads_bounds = self.loss not in WITHOUT_BOUNDS or (self.kl > 0 and self.kl_in == "loss")
        return {
            *(("kl_in", "kl_estimator") if self.kl == 0 else ()),
            *(() if reads_bounds else ("clip_low", "clip_high")),
            *(("correction_level",) if self.correction == "none" else ()),
        }


def has_dual_clip(preset: str, loss: str, clip_high: Any) -> bool:
    """Returns whether `dual_clip` has a default: in GRPO, where it lies beyond the upper bound of the ratio. clip_high:
    a number, or the text of one, as a flag has it."""
    try:
        return preset == "grpo" and loss == "clip" and 1 + float(clip_high) < DUAL_CLIP
    except (TypeError, ValueError):
        return False  # The config says what is wrong with it.


def expanded(given: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """Adds the values of the preset, and defaults that depend on other values, to those that were given."""
    values = {**PRESETS[preset].parts, **given}
    if values.get("old_logprobs") == "recomputed":
        values.setdefault("correction", "cap")
    if has_dual_clip(preset, values["loss"], values.get("clip_high", 0.2)):
        values.setdefault("dual_clip", DUAL_CLIP)
    if values["advantage"] in STANDARDIZING:
        values.setdefault("normalize_std", True)
    return {**DEFAULT_BOUNDS.get(str(values.get("correction")), {}), **values}
