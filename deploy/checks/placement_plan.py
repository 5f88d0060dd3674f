"""Plans where workers run and how many bytes each takes, for `asyncrl plan` and checks of a run."""

from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.config.install_hints import program
from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.config.service_placement import assignment, pool_key, pool_names, pools_of
from asyncrl.deploy.checks.machine import size_text
from asyncrl.deploy.checks.memory_needs import MemoryNeed, needs
from asyncrl.deploy.checks.row_lengths import RowLengths
from asyncrl.engines.model_shape import Shape
from asyncrl.lanes.host_id import HostId

JOINING = "<host that joins>"
NO_WORKERS = ("copies of weights",)
"""Needs that belong to no single worker."""


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One worker. host: its name. domain: what fails with it at one moment. device: what it computes on. need: of all
    workers of its service together. share: the number of those workers."""

    name: str
    host: str
    domain: str
    device: str
    need: MemoryNeed
    share: int

    @property
    def bytes(self) -> int:
        """Returns the estimate of the most that this worker takes."""
        return self.need.bytes // self.share

    @property
    def likely(self) -> int:
        return self.need.expected // self.share

    @property
    def least(self) -> int:
        return self.need.least // self.share


def planned_workers(config: Config, shape: Shape, lengths: RowLengths | None = None) -> Iterator[PlannedWorker]:
    """Yields the workers that need memory, in the order of `needs`."""
    here, found = HostId.here(), assignment(config)
    for need in needs(config, shape, lengths):
        count, ranks = _size(config, need.name)
        places = found.get(need.name, ())
        for number in range(count):
            joins = need.name in config.fleet.joined
            host = places[number][0].host if places else ""
            name = f"{need.name}{number // ranks}.{number % ranks}" if need.name not in NO_WORKERS else need.name
            device = " ".join(place.device for place in places[number]) if places else need.device
            host = host or (JOINING if joins else here.name)
            yield PlannedWorker(name, host, host if joins else here.fault_domain, device, need, count)


def _size(config: Config, name: str) -> tuple[int, int]:
    """Returns the workers of a service, and how many of them are one replica."""
    if name == "training":
        return config.training.layout_dp, config.training.layout_dp
    section = "evaluate" if name == "evaluation" else name
    return getattr(getattr(config, section, None), "replicas", 1), 1


def budget_problems(config: Config, shape: Shape) -> Iterator[Problem]:
    """Yields a problem for each device of a pool whose services need more than its budget, however little they
    sample."""
    pools, names = pools_of(config), pool_names(config)
    loads: dict[tuple[str, str, str], list[PlannedWorker]] = {}
    for worker in planned_workers(config, shape):
        pool = names.get(worker.need.name)
        if pool is not None and pools[pool].memory_bytes:
            for device in worker.device.split():
                loads.setdefault((pool, worker.host, device), []).append(worker)
    for (pool, host, device), workers in loads.items():
        total, budget = sum(worker.least for worker in workers), pools[pool].memory_bytes
        if total > budget:
            largest = max(workers, key=lambda worker: worker.least)
            text = (
                f"{device} of {host} is to hold {', '.join(worker.name for worker in workers)}, which take "
                f"{size_text(total)} at least, and pool {pool!r} allows {size_text(budget)}; {largest.name} takes "
                f"{size_text(largest.least)} of that: {largest.need.lower}, run it in another pool, or raise memory_gb"
            )
            users = dict.fromkeys(pool_key(worker.need.name) for worker in workers)
            yield Problem(f"pools.{pool}.memory_gb", "", text, tuple(users))


def memory_problems(config: Config, shape: Shape, available: int) -> Iterator[Problem]:
    """Yields a problem when the services on the CPU of this host need more memory than it has, however little they
    sample, and for budgets that are too small. available: memory of this host."""
    joined = config.fleet.joined
    found = [each for each in planned_workers(config, shape) if each.device == "cpu" and each.need.name not in joined]
    total = sum(worker.least for worker in found)
    if total > available:
        largest = max(found, key=lambda worker: worker.need.least).need
        text = (
            f"{size_text(available)} of memory are available, and this run takes {size_text(total)} at least, "
            f"{size_text(largest.least)} of that for {largest.name}: {largest.lower}; `{program()} plan` with the "
            "same arguments shows what needs how much"
        )
        yield Problem("", "", text)
    yield from budget_problems(config, shape)
