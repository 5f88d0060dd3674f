"""Says which models may compute samples of one prompt in one row, and what a forward pass costs; without torch."""

from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of transformers that take a mask of their own and compute each token from what the mask lets it see."""
ATTENTION_COST = 1 / 6
"""Cost of a pair of query and key, in tokens times the width of a model: 4 x width operations in each layer, where the
linear maps of a token take 24 x width^2."""


def sharing_width(config: Any) -> int:
    """Returns the width of the hidden states of a model whose rows may share prompts; 0 for any other model."""
    layers = set(getattr(config, "layer_types", None) or ("full_attention",))
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    plain = config.model_type in FAMILIES and layers == {"full_attention"} and not sliding
    return int(config.hidden_size) if plain else 0


def pass_cost(rows: int, length: int, width: int) -> float:
    """Returns the cost of a pass, in tokens. Twice the width stands for plain causal attention, which computes half of
    the pairs."""
    return rows * length * (1 + ATTENTION_COST * length / width)
