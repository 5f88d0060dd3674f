"""Adapters merged into the weights of their base model, tensor by tensor, as vLLM loads them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from asyncrl.config.sections.model_config import LoraConfig
from asyncrl.errors import WeightsError
from asyncrl.lanes.weights.tensor_spec import DTYPES, WeightsSpec


class BaseWeights:
    """Reads the weights of a model folder, one tensor at a time, without holding them. spec: names, shapes and dtype of
    the model. Raises WeightsError when the folder does not have them as safetensors."""

    def __init__(self, folder: Path, spec: WeightsSpec) -> None:
        files: list[Any] = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
        self._spec = spec
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118, it is no mapping
        if missing := [each.name for each in spec.tensors if each.name not in self._file_of]:
            raise WeightsError(
                f"model.lora with vLLM reads the base model from safetensors, and those in {folder} lack "
                f'{", ".join(missing[:4])}: save the model again by save_pretrained, or write engine = "torch"'
            )

    def merged(
        self, adapters: Mapping[str, Tensor], lora: LoraConfig, device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor under each of its names, W + (alpha / rank) B A where there are adapters, computed in
        float32 on `device` and rounded once."""
        aliases: dict[str, list[str]] = {}
        for alias, name in self._spec.aliases:
            aliases.setdefault(name, []).append(alias)
        for each in self._spec.tensors:
            weight = self._file_of[each.name].get_tensor(each.name).to(device)
            layer = each.name.removesuffix(".weight")
            if (down := adapters.get(f"{layer}.lora_A")) is not None:
                up = adapters[f"{layer}.lora_B"]
                delta = up.to(device, torch.float32) @ down.to(device, torch.float32)
                weight = weight.float() + lora.alpha / lora.rank * delta
            weight = weight.to(DTYPES[self._spec.dtype])
            for name in (each.name, *aliases.get(each.name, ())):
                yield name, weight
