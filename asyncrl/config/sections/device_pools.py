"""Hosts, devices and the tables `[pools.NAME]`, with the pure assignment of workers to the devices of their pools.

    pool: devices on hosts          a service names one pool; services in one pool share it, in two they run apart
    worker -> devices of its own    no two workers of one service have the same GPU; a CPU carries any number

Each worker takes the devices with the fewest workers, the first of the pool among equals, so that the loads of two GPUs
of a pool never differ by more than one. Ranks of one replica lie on as few hosts as have room for them, in their order.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NewType, Self

from pydantic import AfterValidator, Field, model_validator

from asyncrl.config.sections.algorithm_config import NonEmpty, Section
from asyncrl.errors import ConfigError
from asyncrl.protocols.rank_layout import Layout, hosts_of_ranks

Device = NewType("Device", str)
"""Names what a worker computes on, on its host: cpu, or cuda:0."""

CPU = Device("cpu")
ONE_RANK = Layout()


@dataclass(frozen=True, slots=True)
class Host:
    """A host by its name, with the GPUs that it reports. It has a CPU."""

    name: str
    gpus: tuple[Device, ...] = ()

    def lacks(self, devices: Sequence[Device]) -> list[Device]:
        """Returns those of the devices that this host does not have."""
        return [device for device in devices if device != CPU and device not in self.gpus]


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Devices that services share. devices: the CPU, or GPUs of each host. hosts: names of hosts that join; none: the
    host of the controller. memory_bytes: budget of each device; 0: what it has."""

    name: str
    devices: tuple[Device, ...] = (CPU,)
    hosts: tuple[str, ...] = ()
    memory_bytes: int = 0

    @property
    def has_gpus(self) -> bool:
        return CPU not in self.devices

    @property
    def places(self) -> list["DevicePlace"]:
        """Returns each device on each host, so that consecutive workers are neighbours."""
        return [DevicePlace(host, device) for host in self.hosts or ("",) for device in self.devices]


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """A device of a host. host: its name; "": the host of the controller, or any host that joins."""

    host: str
    device: Device


@dataclass(frozen=True, slots=True)
class Demand:
    """Devices that a service asks of its pool: for each worker, in the order of replica and rank, so many. layout: of
    the ranks of a replica."""

    service: str
    pool: str
    workers: int
    devices_each: int = 1
    layout: Layout = ONE_RANK


Assignment = Mapping[str, Sequence[tuple[DevicePlace, ...]]]
"""The devices of each worker by service. A list goes on, behind the workers of the demand, with those devices that
further workers of the service would get."""


def assign(pools: Mapping[str, DevicePool], demands: Sequence[Demand]) -> Assignment:
    """Returns the devices of all workers. Raises ConfigError for a pool that does not exist or is too small."""
    loads = {name: dict.fromkeys(pool.places, 0) for name, pool in pools.items()}
    found: dict[str, list[tuple[DevicePlace, ...]]] = {}
    for demand in demands:
        pool = pool_of(pools, demand)
        found[demand.service] = _take(pool, demand, loads[demand.pool])
    return found


def pool_of(pools: Mapping[str, DevicePool], demand: Demand) -> DevicePool:
    """Returns the pool of a service. Raises ConfigError when there is none of this name."""
    if demand.pool not in pools:
        known = f"there are {', '.join(sorted(pools))}" if pools else f"write a table [pools.{demand.pool}]"
        raise ConfigError(f"{demand.service} is to run in pool {demand.pool!r}, which does not exist: {known}")
    return pools[demand.pool]


def _take(pool: DevicePool, demand: Demand, loads: dict[DevicePlace, int]) -> list[tuple[DevicePlace, ...]]:
    """Returns the devices of the workers of a service, and counts them in `loads`."""
    order = sorted(loads, key=loads.__getitem__)  # Equals stay in the order of the pool.
    if demand.layout.size > 1:
        found = list(_ranks(pool, demand, order, loads))
        _refuse_too_small(pool, demand, len(found) or len(order))
    elif pool.has_gpus:
        found = _groups(order, demand.devices_each)
        _refuse_too_small(pool, demand, len(found))
    else:
        found = [(order[number % len(order)],) for number in range(demand.workers)]
    for group in found[: demand.workers]:
        for place in group:
            loads[place] += 1
    return found


def _groups(order: Sequence[DevicePlace], size: int) -> list[tuple[DevicePlace, ...]]:
    """Returns disjoint groups of so many GPUs of one host, those with the first places first."""
    found = []
    waiting = dict[str, list[DevicePlace]]()
    for place in order:
        of_host = waiting.setdefault(place.host, [])
        of_host.append(place)
        if len(of_host) == size:
            found.append(tuple(waiting.pop(place.host)))
    return found


def _ranks(
    pool: DevicePool, demand: Demand, order: Sequence[DevicePlace], loads: Mapping[DevicePlace, int]
) -> Iterator[tuple[DevicePlace, ...]]:
    """Yields the devices of the ranks of one replica after the other, as long as there is room. CPUs have room for all,
    and each host of such a pool takes its share."""
    hosts = pool.hosts or ("",)
    size = demand.layout.size
    free = {host: [place for place in order if place.host == host] for host in hosts}
    if not pool.has_gpus:
        share = -(-demand.workers // len(hosts))
        free = {host: places * share for host, places in free.items()}
    busy = {host: sum(loads[place] for place in set(places)) for host, places in free.items()}
    room = {host: len(free[host]) for host in sorted(hosts, key=busy.__getitem__)}
    while sum(room.values()) >= size:
        for host in hosts_of_ranks(demand.layout, room, {}):
            room[host] -= 1
            yield (free[host].pop(0),)


def _refuse_too_small(pool: DevicePool, demand: Demand, room: int) -> None:
    if demand.workers > room:
        each = f"{demand.devices_each} GPUs of one host" if demand.devices_each > 1 else "a GPU"
        raise ConfigError(
            f"{demand.service} has {demand.workers} workers that need {each} each, and pool {pool.name!r} has room for "
            f"{room} of them: add devices to the pool, or lower the number of workers"
        )


# The tables `[pools.NAME]` of a config.


DEVICE = re.compile(r"cpu|cuda:\d+")
GB = 10**9


def _numbered_device(text: str) -> str:
    if not DEVICE.fullmatch(text):
        raise ValueError(f"{text!r} is no device of a pool; write cpu, or cuda:0")
    return text


class PoolConfig(Section):
    """Devices of one pool, which services name in their key `pool`."""

    devices: tuple[Annotated[str, AfterValidator(_numbered_device)], ...] = ("cpu",)
    """Devices on each host of the pool: numbered GPUs, or cpu."""
    hosts: tuple[NonEmpty, ...] = ()
    """Hosts whose workers may join. Empty: that of the controller."""
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
