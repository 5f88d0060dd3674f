"""The tables `[pools.NAME]` of a config."""

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from asyncrl.config.sections.algorithm_config import NonEmpty, Section
from asyncrl.config.sections.device_pools import Device, DevicePool

DEVICE = re.compile(r"cpu|cuda:\d+")
GB = 10**9


def _numbered_device(text: str) -> str:
    if not DEVICE.fullmatch(text):
        raise ValueError(f"{text!r} is no device of a pool; write cpu, or cuda:0")
    return text


class PoolConfig(Section):
    """Devices of one pool, which services name in their key `pool`."""

    devices: tuple[Annotated[str, AfterValidator(_numbered_device)], ...] = ("cpu",)
    """Devices of the pool, on each of its hosts: numbered GPUs, or cpu alone."""
    hosts: tuple[NonEmpty, ...] = ()
    """Names of the hosts whose workers may join. Empty: the host of the controller."""
    memory_gb: Annotated[float, Field(ge=0)] = 0.0
    """Budget of each device in GB (10^9 bytes); 0: `asyncrl plan` cannot check."""

    @model_validator(mode="after")
    def _devices_are_of_one_kind(self) -> Self:
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise ValueError("name each device of a pool once, and at least one")
        if "cpu" in self.devices and len(self.devices) > 1:
            raise ValueError("a pool is of GPUs, or of the CPU: make two pools")
        if len(set(self.hosts)) < len(self.hosts):
            raise ValueError("name each host of a pool once")
        return self

    def pool(self, name: str) -> DevicePool:
        return DevicePool(name, tuple(map(Device, self.devices)), self.hosts, int(self.memory_gb * GB))
