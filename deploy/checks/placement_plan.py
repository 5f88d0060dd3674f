"""Plans where workers run and how many bytes each takes, for `asyncrl plan` and checks of a run."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from asyncrl.config.install_hints import program
from asyncrl.config.placement import PlacedWorker, Placement
from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.config.service_placement import pool_key, pool_names, pools_of
from asyncrl.deploy.checks.machine import size_text
from asyncrl.deploy.checks.memory_needs import CHECKPOINTS, OFFERED, OFFLOADED, TAKEN, MemoryNeed, needs
from asyncrl.deploy.checks.row_lengths import RowLengths, measured_lengths
from asyncrl.engines.model_shape import Shape
from asyncrl.lanes.host_id import HostId

NO_WORKERS = (OFFLOADED, OFFERED, TAKEN, CHECKPOINTS)
"""Needs that belong to no single worker."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedWorker:
    """One worker, or what workers of one service hold together on a device. host: its name. is_here: whether that is
    the host of the controller. domain: what fails with it at one moment. device: what it computes on. service: whose
    pool it is in. need: of all hosts together. part, whole: its share of that."""

    name: str
    host: str
    is_here: bool
    domain: str
    device: str
    service: str
    need: MemoryNeed
    part: int
    whole: int

    @property
    def bytes(self) -> int:
        """Returns the estimate of the most that this worker takes."""
        return self.need.bytes * self.part // self.whole

    @property
    def likely(self) -> int:
        return self.need.expected * self.part // self.whole

    @property
    def least(self) -> int:
        return self.need.least * self.part // self.whole

    @property
    def floor(self) -> int:
        """Returns the bytes of its device that it takes however little is sampled. On a CPU processes share most of
        theirs; CUDA takes its own for each."""
        return self.least + (self.need.parts.get("process", 0) if self.device != "cpu" else 0)


def planned_workers(config: Config, shape: Shape, lengths: RowLengths | None = None) -> Iterator[PlannedWorker]:
    """Yields the workers that need memory, in the order of `needs`, and what some hold beside that, by host."""
    here, placement = HostId.here(), Placement.of(config)

    def planned(name: str, at: PlacedWorker, device: str, need: MemoryNeed, part: int, whole: int) -> PlannedWorker:
        host = at.host or here.name
        domain = host if at.joins else here.fault_domain
        return PlannedWorker(name, host, not at.joins, domain, device, at.service, need, part, whole)

    for need in needs(config, shape, lengths):
        for worker in () if need.held else placement.workers[need.name]:
            yield planned(worker.name, worker, " ".join(worker.devices), need, 1, len(placement.workers[need.name]))
        holders: dict[tuple[str, str, str], list[PlacedWorker]] = {}
        for worker in need.held:
            device = worker.devices[0] if need.device != "cpu" else "cpu"
            holders.setdefault((worker.host, worker.service, device), []).append(worker)
        for (_, _, device), workers in holders.items():
            part = sum(need.held[each] for each in workers)
            yield planned(need.name, workers[0], device, need, part, sum(need.held.values()))


def budget_problems(config: Config, shape: Shape) -> Iterator[Problem]:
    """Yields a problem for each device of a pool whose services need more than its budget, however little they
    sample, and a warning where they probably do."""
    pools, names = pools_of(config), pool_names(config)
    bounded = {name for name, pool in pools.items() if pool.memory_bytes}
    if bounded.isdisjoint(names.values()):
        return
    loads: dict[tuple[str, str, str], list[PlannedWorker]] = {}
    for worker in planned_workers(config, shape, measured_lengths(config, config.model.name)):
        if (pool := names.get(worker.service)) in bounded:
            for device in set(worker.device.split()) & set(pools[str(pool)].devices):
                loads.setdefault((str(pool), worker.host, device), []).append(worker)
    for (pool, host, device), workers in loads.items():
        users = tuple(dict.fromkeys(pool_key(worker.service) for worker in workers))
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
    found = [each for each in planned_workers(config, shape) if each.device == "cpu" and each.is_here]
    total = sum(worker.least for worker in found)
    if total > available:
        sizes = Counter[str]()
        for each in found:
            sizes[each.need.name] += each.least
        largest = max(found, key=lambda worker: sizes[worker.need.name]).need
        text = (
            f"{size_text(available)} of memory are available, and this run takes {size_text(total)} at least, "
            f"{size_text(sizes[largest.name])} of that for {largest.name}: {largest.lower}; `{program()} plan` with "
            "the same arguments shows what needs how much"
        )
        yield Problem("", "", text)
    yield from budget_problems(config, shape)
