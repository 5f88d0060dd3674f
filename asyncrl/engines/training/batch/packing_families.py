"""Says which models may compute packed rows, and when that is worth it; without torch."""

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of transformers that compute each token from positions that are given and from what attention returns."""

WORTH = 0.92
"""Tokens of a packed row over those of padded ones above which rows are padded: collecting queries, keys and values of
segments costs a step of a model of width 256 some 8 %, and wider ones less (`asyncrl-bench packed-rows`)."""

SHARED_ON_DEVICE = 1.0
"""Length of a prompt over the mean of its answers from which samples share it on a CUDA device. On an H200 a step with
prompts of a quarter was slower than one that computes them again, at 0.86 of its speed."""


def shared_from(device: str) -> float:
    """Returns the least length of a prompt, over the mean of its answers, that samples share on this kind of device."""
    return SHARED_ON_DEVICE if device == "cuda" else 0.0


def is_shared(prompt: int, answers: int, samples: int, least: float) -> bool:
    """Returns whether so many samples share a prompt of so many tokens. answers: tokens of all answers together; least:
    from `shared_from`."""
    return prompt * samples >= least * answers


def can_pack(config: Mapping[str, Any]) -> bool:
    """Returns whether rows of a model may be packed: its layers attend to all earlier tokens. config: the content of
    its config.json."""
    layers = set(config.get("layer_types") or ("full_attention",))
    sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
    return config.get("model_type") in FAMILIES and layers == {"full_attention"} and not sliding
