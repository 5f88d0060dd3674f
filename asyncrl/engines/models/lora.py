"""LoRA adapters (arXiv 2106.09685): low-rank layers beside frozen weights, and their folders in the format of peft.

y = W x + b + (alpha / rank) B A x, where only A [rank, in] and B [out, rank] are trained (section 4.1). An adapted
layer keeps the names of its weight and bias, so that a model with adapters and one without have the same names for the
base model.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from transformers import AutoTokenizer

from asyncrl.config.sections.training_config import ALL_LINEAR, LoraConfig
from asyncrl.engines.models.model_folder import ADAPTER_CONFIG, ADAPTERS
from asyncrl.engines.models.model_loading import load_pretrained
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.lanes.weights.slot_memory import WeightsSpec, spec_of

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
    chosen = lora.adapted(layers)
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


# Folders with adapters in the format of peft: adapter_config.json, adapter_model.safetensors, and a tokenizer.
#
# peft loads such a folder by `PeftModel.from_pretrained(base, folder)`, or transformers with peft installed by
# `AutoModelForCausalLM.from_pretrained(folder)`. The format is read and written here without peft.


PREFIX = "base_model.model."
SUFFIX = ".weight"
"""Text that peft writes before and after the name of a tensor."""


def write_adapters(
    folder: Path, model: Any, lora: LoraConfig, base: str, adapters: Mapping[str, Tensor] | None = None
) -> None:
    """Writes the adapters of a model. base: folder or hub name of the model that they were trained on. adapters: whole
    ones, where those of the model are shards."""
    folder.mkdir(parents=True, exist_ok=True)
    found = published_tensors(model) if adapters is None else adapters
    tensors = {f"{PREFIX}{name}{SUFFIX}": each.cpu() for name, each in found.items()}
    save_file(tensors, folder / ADAPTERS, metadata={"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _target_modules(model, lora),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2) + "\n")


def read_adapters(folder: Path) -> dict[str, Tensor]:
    """Reads adapters by the names that the model has for them. Raises ConfigError when there are none."""
    if not (folder / ADAPTERS).is_file():
        raise ConfigError(f"{folder} holds no adapters: {ADAPTERS} is missing")
    return {name.removeprefix(PREFIX).removesuffix(SUFFIX): each for name, each in load_file(folder / ADAPTERS).items()}


@torch.no_grad()
def load_adapters(folder: Path, model: Any) -> None:
    """Copies adapters into a model that has layers for them. Raises WeightsError when names or shapes differ."""
    own = published_tensors(model)
    read = read_adapters(folder)
    shapes, found = ({name: tensor.shape for name, tensor in tensors.items()} for tensors in (own, read))
    if different := sorted(name for name in {*own, *read} if shapes.get(name) != found.get(name)):
        raise WeightsError(f"{folder} has other adapters than this model; they differ in {', '.join(different[:4])}")
    for name, tensor in own.items():
        tensor.copy_(read[name])


def merge(adapters: Path, base: Path, target: Path) -> None:
    """Writes a folder for from_pretrained whose weights are those of `base` plus what the adapters add, in float32: a
    smaller dtype would round away small additions."""
    described = json.loads((adapters / ADAPTER_CONFIG).read_text())
    rank, alpha, targets = (described[key] for key in ("r", "lora_alpha", "target_modules"))
    model = load_pretrained(base, dtype=torch.float32)
    attach(model, LoraConfig(rank=rank, alpha=alpha, targets=tuple(targets)), seed=0)
    load_adapters(adapters, model)
    merge_adapters(model)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(adapters).save_pretrained(target)


def _target_modules(model: Any, lora: LoraConfig) -> list[str]:
    """Returns names by which peft finds the same layers: those of the config, the last parts of the layers' names where
    they fit no other module, or else whole names."""
    if ALL_LINEAR not in lora.targets:
        return list(lora.targets)
    names = {name for name, _ in adapted(model)}
    last = {name.rpartition(".")[2] for name in names}
    fitting = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last}
    return sorted(last if fitting == names else names)
