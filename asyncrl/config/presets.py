"""Presets of `algorithm.preset`: values of other keys of the section, each of which a config may override."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STANDARDIZING = ("group_mean", "gae")
"""Advantages that are divided by a standard deviation unless `normalize_std` is false."""
DEFAULT_BOUNDS: Mapping[str, Mapping[str, float]] = {
    "cap": {"weight_cap": 2.0},
    "mask": {"weight_floor": 0.5, "weight_cap": 5.0},
}
"""Default bounds of the weight, by `correction`."""

PPO_PARTS = {
    "advantage": "gae",
    "gamma": 1.0,
    "gae_lambda": 0.95,
    "loss": "clip",
    "aggregation": "token_mean",
    "kl_in": "reward",
    "kl_estimator": "k1",
}


@dataclass(frozen=True, slots=True)
class Preset:
    """An algorithm of a paper. parts: keys of `[algorithm]` and their values."""

    paper: str
    parts: Mapping[str, Any]


PRESETS: dict[str, Preset] = {
    "ppo": Preset("arXiv 1707.06347; advantages of arXiv 1506.02438", PPO_PARTS),
    "safe_rlhf": Preset("arXiv 2310.12773", {**PPO_PARTS, "constraint": "lagrangian"}),
    "grpo": Preset(
        "DeepSeekMath, arXiv 2402.03300",
        {"advantage": "group_mean", "loss": "clip", "aggregation": "sequence_mean_token_mean"},
    ),
    "dr_grpo": Preset(
        "arXiv 2503.20783",
        {"advantage": "group_mean", "normalize_std": False, "loss": "clip", "aggregation": "constant"},
    ),
    "rloo": Preset(
        "arXiv 2402.14740",
        {
            "advantage": "leave_one_out",
            "loss": "clip",
            "aggregation": "sequence_mean_token_sum",
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
    ),
    "remax": Preset(
        "arXiv 2310.10505",
        {
            "advantage": "greedy",
            "loss": "clip",
            "aggregation": "sequence_mean_token_sum",
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
    ),
    "reinforce_plus_plus": Preset(
        "arXiv 2501.03262",
        {"advantage": "batch", "loss": "clip", "aggregation": "token_mean", "kl_in": "reward", "kl_estimator": "k1"},
    ),
    "reinforce_plus_plus_baseline": Preset(
        "arXiv 2501.03262",
        {"advantage": "group_batch", "loss": "clip", "aggregation": "token_mean", "kl_in": "loss"},
    ),
    "dapo": Preset(
        "arXiv 2503.14476",
        {
            "advantage": "group_mean",
            "loss": "clip",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "aggregation": "token_mean",
            "dynamic_sampling": True,
            "overlong": 0.2,
        },
    ),
    "gspo": Preset(
        "arXiv 2507.18071",
        {
            "advantage": "group_mean",
            "loss": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "aggregation": "sequence_mean_token_mean",
            # Bounds this narrow hold nearly every row that an older version sampled (docs/learning.md).
            "old_logprobs": "recomputed",
            "correction": "cap",
        },
    ),
    "cispo": Preset(
        "MiniMax-M1, arXiv 2506.13585; bounds of ScaleRL, arXiv 2510.13786",
        {"advantage": "group_mean", "loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token_mean"},
    ),
    "gmpo": Preset(
        "arXiv 2507.20673",
        {
            "advantage": "group_mean",
            "loss": "gmpo",
            "clip_low": 0.4,
            "clip_high": 0.4,
            "aggregation": "sequence_mean_token_mean",
        },
    ),
    "m2po": Preset(
        "arXiv 2510.01161",
        {"advantage": "group_mean", "loss": "m2po", "second_moment": 0.04, "aggregation": "token_mean"},
    ),
    "sapo": Preset(
        "arXiv 2511.20347",
        {
            "advantage": "group_mean",
            "loss": "sapo",
            "gate_temperatures": (1.0, 1.05),
            "aggregation": "sequence_mean_token_mean",
        },
    ),
}


def expanded(given: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """Adds the values of the preset, and defaults that depend on other values, to those that were given."""
    values = {**PRESETS[preset].parts, **given}
    if values.get("old_logprobs") == "recomputed":
        values.setdefault("correction", "cap")
    if values["advantage"] in STANDARDIZING:
        values.setdefault("normalize_std", True)
    return {**DEFAULT_BOUNDS.get(str(values.get("correction")), {}), **values}
