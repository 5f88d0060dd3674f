"""The shape of what generation records of the routers for each token, read from a model's config.json, without torch.

record of a token    layer 0: k numbers of experts | layer 1: k numbers | ...       layers with experts only
dtype                one byte up to 255 experts, else two
NONE                 the largest number of the dtype: nothing is recorded of the token
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.protocols.batch import Columns, expert_columns

KEY = "training.router_replay"
REPLAYED = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
"""Families, by `model_type`, whose routers are recorded and replayed."""


@dataclass(frozen=True, slots=True)
class RecordShape:
    """routers: layers with experts. chosen: experts of a token in each of them. experts: of each layer."""

    routers: int
    chosen: int
    experts: int

    @property
    def width(self) -> int:
        """Returns the numbers recorded for each token."""
        return self.routers * self.chosen

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("u1" if self.experts <= 255 else "<i2")

    @property
    def none(self) -> int:
        """Returns the number that stands where nothing is recorded."""
        return int(np.iinfo(self.dtype).max)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Reads the content of a config.json. Raises ConfigError for a model whose routers are not replayed."""
        family = str(config.get("model_type") or "")
        if family not in REPLAYED:
            raise ConfigError(
                f"{KEY}: the model is of the family {family!r}, and the experts of {', '.join(REPLAYED)} are replayed; "
                "remove the key"
            )
        experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
        plain = set(config.get("mlp_only_layers") or ())
        step = int(config.get("decoder_sparse_step") or 1)
        layers = range(int(config["num_hidden_layers"]))
        routers = sum(layer not in plain and (layer + 1) % step == 0 for layer in layers) if experts else 0
        return cls(routers, int(config["num_experts_per_tok"]), experts)

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Raises ConfigError as `of`."""
        return cls.of(json.loads((folder / "config.json").read_bytes()))


def recorded_columns(config: Config, folder: Path, tokens: int) -> Columns:
    """Returns the column of experts of rows with so many tokens, none where nothing is recorded. folder: of the model.
    Raises ConfigError as `RecordShape.of`."""
    if not config.training.router_replay:
        return {}
    shape = RecordShape.of_folder(folder)
    return expert_columns(tokens, shape.dtype, shape.width)


# Tells which models' experts ranks can share out, from config.json, without torch.


def refusal_of_sharing(shape: Mapping[str, Any], ranks: int) -> str:
    """Returns why so many ranks cannot share out the experts of a model; "" where they can. shape: the content of its
    config.json."""
    family = str(shape.get("model_type") or "")
    experts = int(shape.get("num_local_experts") or shape.get("num_experts") or 0)
    if family not in REPLAYED or not experts:
        return (
            f"ep = {ranks} is not supported for the family {family!r}: ranks share out the experts of "
            f"{', '.join(REPLAYED)}; write ep = 1, and dp or shard for ranks"
        )
    if experts % ranks:
        divisors = ", ".join(str(each) for each in range(1, experts + 1) if experts % each == 0)
        return f"ep = {ranks} is not supported for a model with {experts} experts: write one of {divisors}"
    return ""
