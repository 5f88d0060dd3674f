"""Folders with adapters in the format of peft: adapter_config.json, adapter_model.safetensors, and a tokenizer.

peft loads such a folder by `PeftModel.from_pretrained(base, folder)`, or transformers with peft installed by
`AutoModelForCausalLM.from_pretrained(folder)`. The format is read and written here without peft.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from asyncrl.config.sections.training_config import ALL_LINEAR, LoraConfig
from asyncrl.engines.lora.low_rank import adapted, attach, merge_adapters, published_tensors
from asyncrl.engines.model_loading import load_pretrained
from asyncrl.engines.models.model_folder import ADAPTER_CONFIG, ADAPTERS
from asyncrl.errors import ConfigError, WeightsError

PREFIX = "base_model.model."
SUFFIX = ".weight"
"""What peft writes before and after the name of a tensor."""


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
    if shapes(own) != shapes(read):
        different = sorted(name for name in {*own, *read} if shapes(own).get(name) != shapes(read).get(name))
        raise WeightsError(f"{folder} has other adapters than this model; they differ in {', '.join(different[:4])}")
    for name, tensor in own.items():
        tensor.copy_(read[name])


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


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
