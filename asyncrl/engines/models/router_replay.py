"""Records which experts a forward pass chose, and lets another pass use them.

    generation   router chooses k experts ──────── recorded with the token
    training     router's logits, the recorded experts, weights of these by the logits: the gradient reaches the router

Sources: Group Sequence Policy Optimization (arXiv 2507.18071, section 5.3, routing replay); Stabilizing MoE
Reinforcement Learning by Aligning Training and Inference Routers (arXiv 2510.11370, rollout routing replay: the experts
of the engine that sampled, for tokens of the prompt too).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.engines.models.model_families import RecordShape
from asyncrl.errors import ConfigError

Weights = Callable[[Any, Tensor, Tensor], Tensor]
"""Maps router, its logits [tokens, experts] and chosen experts [tokens, k] to weights [tokens, k]."""


class ChosenExperts:
    """Keeps the choices of the last forward pass of a model that generates."""

    def __init__(self, model: nn.Module, shape: RecordShape) -> None:
        """Raises ConfigError as `routers_of`."""
        self._dtype = torch.uint8 if shape.dtype.itemsize == 1 else torch.int16
        self._choices: list[Tensor] = []
        for router in routers_of(model, shape):
            router.register_forward_hook(self._keep)

    def taken(self) -> Tensor:
        """Returns the choices [tokens, routers x k] of the pass, and forgets them."""
        found = torch.cat([choice.to(self._dtype) for choice in self._choices], -1)
        self._choices.clear()
        return found

    def _keep(self, _: nn.Module, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._choices.append(output[2])


class RouterReplay:
    """Lets the routers of a model choose what was recorded. A pass whose activations are computed again in its backward
    pass finds the record that was last given, so passes are not interleaved."""

    def __init__(self, model: nn.Module, shape: RecordShape) -> None:
        """Raises ConfigError as `routers_of`."""
        self.shape = shape
        self._record: Tensor | None = None
        self._counts: Tensor | None = None
        for number, router in enumerate(routers_of(model, shape)):
            router.register_forward_hook(partial(self._replay, number))

    def follow(self, record: Tensor | None) -> None:
        """Sets the record [tokens, routers x k] of the tokens of the next pass; None: routers choose themselves, as
        they do for a token without record."""
        self._record = None if record is None else record.reshape(-1, self.shape.routers, self.shape.chosen)

    def others(self, over_ranks: Callable[[Tensor], Tensor]) -> float:
        """Returns how often, of the times since the last call that a router was given a record, its own experts would
        have been others. over_ranks: sums over the ranks of the trainer."""
        counts = torch.zeros(2, dtype=torch.float64) if self._counts is None else self._counts.cpu().double()
        self._counts = None
        given, others = map(float, over_ranks(counts))
        return others / max(1.0, given)

    def _replay(
        self, number: int, router: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._record is None:
            return None
        logits, _, own = output
        recorded = self._record[:, number]
        known = recorded[:, :1] != self.shape.none
        chosen = torch.where(known, recorded.long(), own)
        self._count(known[:, 0], chosen, own)
        return logits, weights_of(router, logits, chosen), chosen

    @torch.no_grad()
    def _count(self, known: Tensor, chosen: Tensor, own: Tensor) -> None:
        others = (chosen.sort(-1).values != own.sort(-1).values).any(-1) & known
        counts = torch.stack([known.sum(), others.sum()])
        self._counts = counts if self._counts is None else self._counts + counts


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
