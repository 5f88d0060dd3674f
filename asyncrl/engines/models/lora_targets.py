"""Matches `model.lora.targets` with the layers of a model. Without torch."""

from collections.abc import Collection

from asyncrl.config.sections.training_config import ALL_LINEAR, LoraConfig
from asyncrl.errors import ConfigError


def adapted_names(lora: LoraConfig, layers: Collection[str]) -> set[str]:
    """Returns the names of the layers that get an adapter. layers: names of the linear layers. Raises ConfigError when
    a target names none of them."""
    return {name for target in lora.targets for name in _matches(target, layers)}


def _matches(target: str, layers: Collection[str]) -> list[str]:
    found = [name for name in layers if target == ALL_LINEAR or f".{name}".endswith(f".{target}")]
    if not found:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers})) or "none"
        raise ConfigError(
            f"model.lora: targets names {target!r}, and no linear layer of the model has this name. Layers that can "
            f"be adapted: {known}; or write {ALL_LINEAR!r} for all of them"
        )
    return found
