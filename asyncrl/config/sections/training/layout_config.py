"""The tables `training.layout`, `generation.layout`, `critic.layout` and others: how ranks share rows and weights."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import Field, model_validator

from asyncrl.config.sections.algorithm_config import Section

Ranks = Annotated[int, Field(gt=0, strict=True)]
AXES_OF_TRAINER = ("pp", "sp", "ep")
"""Axes that only the trainer has: stages, slices of rows and shares of experts."""


class LayoutConfig(Section):
    """Sizes of the axes of a replica of a service; it has tp x dp x shard ranks, one process each."""

    tp: Ranks = 1
    """Tensor-parallel ranks, which hold parts of every layer."""
    dp: Ranks = 1
    """Copies of the weights, with rows of their own."""
    shard: Ranks = 1
    """Ranks that share out the weights of a copy, as FSDP does, with rows of their own."""

    @model_validator(mode="before")
    @classmethod
    def _of_older_runs(cls, given: Any) -> Any:
        """Leaves out the axes of the trainer where they are 1, as the config.toml of older runs has them."""
        if not isinstance(given, Mapping):
            return given
        return {axis: size for axis, size in given.items() if axis not in AXES_OF_TRAINER or size != 1}

    @property
    def pp(self) -> int:
        """Returns the number of pipeline stages."""
        return 1

    @property
    def sp(self) -> int:
        """Returns the number of slices of the tokens of a row."""
        return 1

    @property
    def ep(self) -> int:
        """Returns the number of shares of the experts of a layer."""
        return 1

    @property
    def data(self) -> int:
        """Returns the number of ranks with rows of their own."""
        return self.dp * self.shard

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self.tp * self.data


class TrainingLayoutConfig(Section):
    """Sizes of the axes of the trainer, which has pp x tp x sp x dp x shard x ep ranks, one process each."""

    pp: Ranks = 1
    """Pipeline stages, each with some of the layers; alone, or beside tp or dp."""
    tp: Ranks = 1
    """Tensor-parallel ranks, which hold parts of every layer."""
    sp: Ranks = 1
    """Ranks that train a slice of the tokens of every row (Ulysses); alone, or beside dp."""
    dp: Ranks = 1
    """Copies of the weights, with rows of their own."""
    shard: Ranks = 1
    """Ranks that share out the weights of a copy, as FSDP does, with rows of their own."""
    ep: Ranks = 1
    """Ranks that share out the experts of each layer, with rows of their own; alone, or beside dp."""

    @property
    def data(self) -> int:
        """Returns the number of ranks with rows of their own."""
        return self.dp * self.shard * self.ep

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self.pp * self.tp * self.sp * self.data


AnyLayout: TypeAlias = LayoutConfig | TrainingLayoutConfig


class GenerationLayoutConfig(Section):
    """Sizes of the groups in which the trainer's ranks sample together."""

    pp: Ranks = 1
    """Ranks that hold some of the layers and their keys and values; a divisor of that in training."""
    tp: Ranks = 1
    """Ranks that hold parts of every layer, and of keys and values; a divisor of that in training."""

    @property
    def size(self) -> int:
        """Returns the number of ranks of a group."""
        return self.pp * self.tp

    @property
    def shared_out(self) -> dict[str, int]:
        """Returns the sizes above one, by axis."""
        return {axis: size for axis, size in (("pp", self.pp), ("tp", self.tp)) if size > 1}
