"""Plans where workers run and how many bytes each takes, for `asyncrl plan` and checks of a run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from asyncrl.config.install_hints import program
from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.config.service_placement import assignment, layouts, pool_key, pool_names, pools_of, process_of
from asyncrl.deploy.checks.machine import size_text
from asyncrl.deploy.checks.memory_needs import OFFLOADED, MemoryNeed, needs
from asyncrl.deploy.checks.row_lengths import RowLengths, measured_lengths
from asyncrl.engines.model_shape import Shape
from asyncrl.lanes.host_id import HostId

JOINING = "<host that joins>"
NO_WORKERS = (OFFLOADED, "copies of weights", "copies for checkpoints")
"""Needs that belong to no single worker."""


@dataclass(frozen=True, slots=True, eq=False)
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

    @property
    def floor(self) -> int:
        """Returns the bytes of its device that it takes however little is sampled. On a CPU processes share most of
        theirs; CUDA takes its own for each."""
        return self.least + (self.need.parts.get("process", 0) if self.device != "cpu" else 0)


def planned_workers(config: Config, shape: Shape, lengths: RowLengths | None = None) -> Iterator[PlannedWorker]:
    """Yields the workers that need memory, in the order of `needs`."""
    here, found = HostId.here(), assignment(config)
    for need in needs(config, shape, lengths):
        count, ranks = _size(config, need.name)
        places = found.get(process_of(config, need.name), ())
        for number in range(count):
            joins = need.name in config.fleet.joined
            host = places[number][0].host if places else ""
            name = f"{need.name}{number // ranks}.{number % ranks}" if need.name not in NO_WORKERS else need.name
            device = " ".join(place.device for place in places[number]) if places else need.device
            host = host or (JOINING if joins else here.name)
            yield PlannedWorker(name, host, host if joins else here.fault_domain, device, need, count)


def _size(config: Config, name: str) -> tuple[int, int]:
    """Returns the workers of a service, and how many of them are one replica."""
    if name == "generation":
        return config.generation_workers, 1
    ranks = layouts(config)[name].size if name in layouts(config) else 1
    section = "evaluate" if name == "evaluation" else name
    return getattr(getattr(config, section, None), "replicas", 1) * ranks, ranks


def budget_problems(config: Config, shape: Shape) -> Iterator[Problem]:
    """Yields a problem for each device of a pool whose services need more than its budget, however little they
    sample, and a warning where they probably do."""
    pools, names = pools_of(config), pool_names(config)
    bounded = {name for name, pool in pools.items() if pool.memory_bytes}
    if bounded.isdisjoint(names.values()):
        return
    loads: dict[tuple[str, str, str], list[PlannedWorker]] = {}
    for worker in planned_workers(config, shape, measured_lengths(config, config.model.name)):
        if (pool := names.get(process_of(config, worker.need.name))) in bounded:
            for device in worker.device.split():
                loads.setdefault((str(pool), worker.host, device), []).append(worker)
    for (pool, host, device), workers in loads.items():
        users = tuple(dict.fromkeys(pool_key(process_of(config, worker.need.name)) for worker in workers))
        budget, where = pools[pool].memory_bytes, f"{device} of {host}"
        for is_warning, size in ((False, attrgetter("floor")), (True, attrgetter("likely"))):
            if sum(map(size, workers)) > budget:
                text = _over_budget(pool, where, budget, {worker: size(worker) for worker in workers}, is_warning)
                yield Problem(f"pools.{pool}.memory_gb", "", text, users, is_warning)
                break


def _over_budget(pool: str, where: str, budget: int, sizes: Mapping[PlannedWorker, int], is_likely: bool) -> str:
    """Returns what is wrong about a device, and what to do. sizes: of its workers."""
    largest, total = max(sizes, key=sizes.__getitem__), size_text(sum(sizes.values()))
    need = f"probably needs {total}" if is_likely else f"needs {total} at least"
    return (
        f"{where} {need} for {', '.join(worker.name for worker in sizes)}, and pool {pool!r} allows "
        f"{size_text(budget)}; {largest.name} takes {size_text(sizes[largest])} of that: {largest.need.lower}, run it "
        "in another pool, or raise memory_gb"
    )


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
