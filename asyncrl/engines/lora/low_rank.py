"""Low-rank layers: y = W x + b + (alpha / rank) B A x, where only A [rank, in] and B [out, rank] are trained.

Source: LoRA (arXiv 2106.09685, section 4.1). An adapted layer keeps the names of its weight and bias, so that a model
with adapters and one without have the same names for the base model.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from asyncrl.config.sections.training_config import LoraConfig
from asyncrl.engines.lora.target_layers import adapted_names
from asyncrl.lanes.weights.tensor_spec import WeightsSpec, spec_of

PROBE_DEVIATION = 0.02
"""Standard deviation of B before the first version arrives, so that the probe of an engine sees adapters that do
something; it is about that of the weights of new models."""


class LowRankLinear(nn.Module):
    """A frozen linear layer with an adapter. scale: alpha / rank. applied: whether the adapter is added now.

    lora_A is drawn as nn.Linear draws its weight, and lora_B is 0, so that a new adapter changes nothing. Both have
    memory on the host where the weight has none yet.
    """

    def __init__(self, base: nn.Linear, lora: LoraConfig, random: torch.Generator) -> None:
        super().__init__()
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.weight = base.weight
        self.bias = base.bias
        self.scale = lora.alpha / lora.rank
        self.dropout = lora.dropout
        self.applied = True
        down = torch.empty(lora.rank, base.in_features)
        nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=random)
        where = down.device if base.weight.is_meta else base.weight.device
        self.lora_A = nn.Parameter(down.to(where, base.weight.dtype))
        self.lora_B = nn.Parameter(base.weight.new_zeros(base.out_features, lora.rank, device=where))
        self.train(base.training)

    def forward(self, states: Tensor) -> Tensor:
        """Maps states [..., in] to [..., out]. Dropout acts only where a gradient is computed, so that log-probs of the
        same weights agree everywhere else."""
        whole = linear(states, self.weight, self.bias)
        if not self.applied:
            return whole
        if self.dropout and self.training and torch.is_grad_enabled():
            states = dropout(states, self.dropout)
        return whole + self.scale * linear(linear(states, self.lora_A), self.lora_B)

    def delta(self) -> Tensor:
        """Returns what the adapter adds to the weight, [out, in]."""
        return self.scale * (self.lora_B @ self.lora_A)


def attach(model: Any, lora: LoraConfig, seed: int) -> None:
    """Freezes a transformers model and adapts the linear layers that `lora.targets` names. The same seed gives the same
    adapters. Raises ConfigError when a target names no such layer."""
    head = model.get_output_embeddings()
    layers = {name: each for name, each in model.named_modules() if type(each) is nn.Linear and each is not head}
    chosen = adapted_names(lora, layers)
    model.requires_grad_(False)
    random = torch.Generator().manual_seed(seed)
    for name in (name for name in layers if name in chosen):
        model.set_submodule(name, LowRankLinear(layers[name], lora, random))


def fill_for_probe(model: Any) -> None:
    """Draws every B of an engine's model, whose adapters are replaced by those of the first version."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, layer in adapted(model):
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=random) * PROBE_DEVIATION)


def adapted(model: nn.Module) -> Iterator[tuple[str, LowRankLinear]]:
    """Yields names and layers that have an adapter."""
    return ((name, each) for name, each in model.named_modules() if isinstance(each, LowRankLinear))


def published_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights that training changes: those of the adapters, or without any all of them, tied ones under
    every name as one tensor, which nobody has to compare: ranks compare sharded ones together."""
    adapters = {
        f"{name}.{part}": getattr(layer, part).detach()
        for name, layer in adapted(model)
        for part in ("lora_A", "lora_B")
    }
    if adapters:
        return adapters
    found: dict[int, Tensor] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: found.setdefault(id(each), each.detach()) for name, each in named}


def published_spec(model: nn.Module, dtype: str) -> WeightsSpec:
    """Returns names, shapes and dtype of the weights of a version."""
    if next(adapted(model), None) is None:
        return spec_of(model, dtype)
    return WeightsSpec.of({name: tuple(each.shape) for name, each in published_tensors(model).items()}, dtype)


@torch.no_grad()
def merge_adapters(model: Any) -> None:
    """Adds what the adapters add to the weights of their layers, which become plain linear layers."""
    for name, layer in list(adapted(model)):
        layer.weight += layer.delta()
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        plain.weight = layer.weight
        plain.bias = layer.bias
        model.set_submodule(name, plain)


@contextmanager
def base_model(model: nn.Module) -> Iterator[None]:
    """Leaves the adapters out while the scope is open, so that the frozen base model computes."""
    layers = [layer for _, layer in adapted(model)]
    for layer in layers:
        layer.applied = False
    try:
        yield
    finally:
        for layer in layers:
            layer.applied = True
