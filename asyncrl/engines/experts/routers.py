"""The routers of a transformers model, and the weights that they give to experts, whoever chose these."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.engines.experts.record_shape import RecordShape
from asyncrl.errors import ConfigError

Weights = Callable[[Any, Tensor, Tensor], Tensor]
"""Maps router, its logits [tokens, experts] and chosen experts [tokens, k] to weights [tokens, k]."""


def _mixtral_weights(_: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    found = logits.float().softmax(-1).gather(-1, chosen)
    return found / found.sum(-1, keepdim=True)


def _qwen_weights(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    found = logits.softmax(-1, dtype=torch.float).gather(-1, chosen)
    if router.norm_topk_prob:
        found = found / found.sum(-1, keepdim=True)
    return found.to(logits.dtype)


def _gpt_oss_weights(_: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    found = logits.gather(-1, chosen)
    return found.softmax(-1, dtype=found.dtype)


WEIGHTS: Mapping[str, Weights] = {
    "MixtralTopKRouter": _mixtral_weights,
    "Qwen2MoeTopKRouter": _qwen_weights,
    "Qwen3MoeTopKRouter": _qwen_weights,
    "GptOssTopKRouter": _gpt_oss_weights,
}
"""Functions that weigh the experts of a token as the routers of each family do, by the name of their class."""


def routers_of(model: nn.Module, shape: RecordShape) -> list[nn.Module]:
    """Returns the routers in the order of their layers. Raises ConfigError when they are not those of config.json."""
    found = [module for module in model.modules() if type(module).__name__ in WEIGHTS]
    if len(found) != shape.routers:
        raise ConfigError(
            f"training.router_replay: {type(model).__name__} has {len(found)} routers where its config.json means "
            f"{shape.routers}; remove the key, or install another version of transformers"
        )
    return found


def weights_of(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Returns the weights [tokens, k] of chosen experts as the model computes those of its own choice."""
    return WEIGHTS[type(router).__name__](router, logits, chosen)
