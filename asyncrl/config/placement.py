"""The one placement of a run: which worker of which service runs on which host, on which devices.

config ──> pools, layouts, fleet.joined ──> Placement ──> memory checks, `plan`, transport of weights, places where
                                                          workers join, devices of specifications, Ray
hosts that joined ──> rank_hosts.py, by the same rule ──> ranks on the hosts that are there
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.config.sections.device_pools import CPU, Assignment, Device, DevicePlace
from asyncrl.config.service_placement import assignment, layouts, rank_layout, replicas_of, services_of
from asyncrl.protocols.rank_layout import Layout, crossings

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

HERE = ""
"""Name of the host of the controller, whatever it is called."""
ANY_HOST = "<host that joins>"
"""Name of a host that nothing names before it joins. Two workers on such hosts may be on one, or on two."""


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    """A worker and where it runs. number: among all workers of its service, in the order of replica and rank. host:
    HERE, ANY_HOST, or one that a pool names. devices: several for one worker that leads processes of its own. joins:
    whether it comes over the network, and so shares no memory with others."""

    service: str
    number: int
    ranks: int
    host: str
    devices: tuple[Device, ...]
    joins: bool

    @property
    def name(self) -> str:
        return f"{self.service}{self.number // self.ranks}.{self.number % self.ranks}"

    @property
    def places(self) -> tuple[DevicePlace, ...]:
        return tuple(DevicePlace(self.host, device) for device in self.devices)

    @property
    def on_gpu(self) -> bool:
        return CPU not in self.devices

    def may_share_memory(self, other: "PlacedWorker") -> bool:
        """Returns whether both are processes of one host that map the same memory."""
        return self.host == other.host and not (self.joins or other.joins)

    def shares_gpu(self, other: "PlacedWorker") -> bool:
        """Returns whether both certainly have a GPU in common. Hosts without a name may be two."""
        return self.on_gpu and self.host != ANY_HOST and not set(self.places).isdisjoint(other.places)


@dataclass(frozen=True, slots=True)
class Placement:
    """Holds where the workers of each service of a config run. layouts: of the ranks of a replica. pooled: devices of
    the workers with a pool, and behind them those that further workers would get."""

    workers: Mapping[str, tuple[PlacedWorker, ...]]
    layouts: Mapping[str, Layout]
    pooled: Assignment

    @classmethod
    def of(cls, config: "Config") -> "Placement":
        """Raises ConfigError for a pool that does not fit."""
        pooled = assignment(config)
        ranks = {name: rank_layout(layout) for name, layout in layouts(config).items()}
        found = {}
        for service in services_of(config):
            size = ranks.get(service, Layout()).size
            joins = service in config.fleet.joined
            unnamed = ANY_HOST if joins else HERE
            count = replicas_of(config, service) * size
            usual = [(DevicePlace(unnamed, device_of(config, service, number, size)),) for number in range(count)]
            found[service] = tuple(
                PlacedWorker(service, number, size, each[0].host or unnamed, tuple(at.device for at in each), joins)
                for number, each in enumerate(pooled.get(service, usual)[:count])
            )
        return cls(found, ranks, pooled)

    @property
    def trainer(self) -> PlacedWorker:
        """Returns the rank that publishes weights."""
        return self.workers["training"][0]

    @property
    def readers(self) -> tuple[PlacedWorker, ...]:
        """Returns the workers that read published weights."""
        return (*self.workers["generation"], *self.workers.get("evaluation", ()))

    def crossings(self) -> Iterator[str]:
        """Yields a sentence for each kind of groups of ranks that lie on several hosts, as far as hosts are named."""
        for service, workers in self.workers.items():
            hosts = [each.host for each in workers[: workers[0].ranks]] if workers else []
            if len(set(hosts) - {ANY_HOST}) > 1:
                yield from crossings(service, self.layouts[service], hosts)


def device_of(config: "Config", service: str, number: int = 0, ranks: int = 1) -> Device:
    """Returns the device of a worker as its section names it, with a number. Ranks on "cuda" take one GPU each."""
    section = getattr(config, "generation" if service == "evaluation" else service)
    if service in config.scorers and not section.model:
        return CPU  # Functions run in child processes.
    device = getattr(section, "device", CPU)
    return Device(f"cuda:{number % ranks}") if device == "cuda" else Device(device)
