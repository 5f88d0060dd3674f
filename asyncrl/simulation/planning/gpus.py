"""GPUs by name, from `gpus.toml` or a table of the user, and their rates at each level of efficiency."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from asyncrl.errors import ConfigError

Levels: TypeAlias = tuple[float, float, float]
"""A number at low, likely and high efficiency."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Holds what a GPU does at one level of efficiency. compute, training: operations a second; memory, link, network:
    bytes a second; experts: share of compute that layers of experts reach; step, latency: seconds."""

    compute: float
    training: float
    experts: float
    memory: float
    link: float
    network: float
    step: float
    latency: float
    gpus_per_host: int

    def bandwidth(self, span: int, stride: int | None = None) -> float:
        """Returns the bytes a second of one GPU in a ring within so many consecutive GPUs.

        stride: of the members of the group; without, every member exchanges with hosts on its own. Members on one host
        take what comes in once, so that the group has the network of them all.
        """
        if span <= self.gpus_per_host:
            return self.link
        shared = 1 if stride is None else max(1, self.gpus_per_host // stride)
        return min(self.link, self.network * shared)


class Gpu(BaseModel):
    """The numbers of one GPU; units and sources are at the top of `gpus.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    peak: float = Field(gt=0)
    memory: float = Field(gt=0)
    bandwidth: float = Field(gt=0)
    link: float = Field(gt=0)
    network: float = Field(gt=0)
    gpus_per_host: int = Field(gt=0)
    compute: Levels
    memory_share: Levels
    training: Levels
    experts: Levels
    links: Levels
    fabric: Levels
    step: Levels
    latency: Levels

    @property
    def levels(self) -> tuple[Rates, Rates, Rates]:
        """Returns the rates at low, likely and high efficiency."""
        low, likely, high = map(self._rates, range(3))
        return low, likely, high

    @property
    def likely(self) -> Rates:
        return self.levels[1]

    def _rates(self, level: int) -> Rates:
        return Rates(
            compute=self.peak * self.compute[level],
            training=self.peak * self.training[level],
            experts=self.experts[level],
            memory=self.bandwidth * self.memory_share[level],
            link=self.link * self.links[level],
            network=self.network * self.fabric[level],
            step=self.step[level],
            latency=self.latency[level],
            gpus_per_host=self.gpus_per_host,
        )


@cache
def known_gpus() -> Mapping[str, Gpu]:
    return _parse(tomllib.loads((Path(__file__).parent / "gpus.toml").read_text()), "gpus.toml")


def read_gpus(path: Path | None) -> Mapping[str, Gpu]:
    """Returns the known GPUs and those of a user's TOML or JSON table, which win. Raises ConfigError for a bad one."""
    if path is None:
        return known_gpus()
    try:
        text = path.read_text()
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the table of GPUs {path} cannot be read: {error}") from error
    return {**known_gpus(), **_parse(table, str(path))}


def gpu_named(name: str, gpus: Mapping[str, Gpu] | None = None) -> Gpu:
    """Returns a GPU. Raises ConfigError for an unknown name."""
    gpus = gpus or known_gpus()
    if name not in gpus:
        raise ConfigError(f"there is no GPU {name!r}; known are {', '.join(gpus)}, or write a table of yours (--gpus)")
    return gpus[name]


def _parse(table: Mapping[str, Any], where: str) -> dict[str, Gpu]:
    try:
        return {name: Gpu.model_validate(values) for name, values in table.items()}
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {key}: {first['msg']}; every GPU needs {', '.join(Gpu.model_fields)}") from error
