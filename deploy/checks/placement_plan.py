"""Plans where workers run and how many bytes each takes, for `asyncrl plan` and checks of a run."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
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
        """Returns the bytes of its devices that it takes however little is sampled."""
        return self.least + self.need.process

    @property
    def devices(self) -> list[str]:
        """Returns its devices, which have equal shares of its bytes."""
        return self.device.split()


def planned_workers(config: Config, shape: Shape, lengths: RowLengths | None = None) -> Iterator[PlannedWorker]:
    """Yields the workers that need memory, in the order of `needs`, and what some hold beside that, by host."""
    here = HostId.here()
    placement = Placement.of(config)

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
    if not any(pools_of(config)[pool].memory_bytes for pool in pool_names(config).values()):
        return
    for (pool, host, device), workers in _loads(config, shape).items():
        if not (budget := pools_of(config)[pool].memory_bytes if pool else 0):
            continue
        where = f"{device} of {host}"
        users = _keys(workers)
        for is_warning, size in ((False, attrgetter("floor")), (True, attrgetter("likely"))):
            sizes = {worker: size(worker) // len(worker.devices) for worker in workers}
            if sum(sizes.values()) > budget:
                text = _over_budget(pool, where, budget, sizes, is_warning)
                yield Problem(f"pools.{pool}.memory_gb", "", text, users, is_warning)
                break


def unchecked_memory(config: Config, shape: Shape) -> Iterator[Problem]:
    """Yields a note for the devices of each pool without a budget, for GPUs without a pool, and for the memory of other
    hosts, which nobody here knows."""
    found = dict[tuple[str, str], dict[str, list[PlannedWorker]]]()
    for (pool, host, device), workers in _loads(config, shape).items():
        is_known = pools_of(config)[pool].memory_bytes if pool else all(each.is_here for each in workers)
        if is_known and (pool or device == "cpu"):
            continue
        found.setdefault((pool, "cpu" if device == "cpu" else ""), {})[f"{device} of {host}"] = workers
    for (pool, cpu), places in found.items():
        named = sorted(places)
        users = _keys(chain(*places.values()))
        need = max(sum(each.likely // len(each.devices) for each in workers) for workers in places.values())
        where = f"{named[0]} to {named[-1]}" if len(named) > 2 else " and ".join(named)
        text = f"the memory of {where} was not checked, where services probably need up to {size_text(need)} each"
        if pool:
            write = f"write the GB (10^9 bytes) of one device as pools.{pool}.memory_gb"
        elif cpu:
            write = "no key says how much such a host has: see that it is more"
        else:
            write = "name a pool with memory_gb, the GB (10^9 bytes) of one device"
        yield Problem(f"pools.{pool}.memory_gb" if pool else "", "", f"{text}: {write}", users, is_warning=True)


def _keys(workers: Iterable[PlannedWorker]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(pool_key(worker.service) for worker in workers))


def _loads(config: Config, shape: Shape) -> dict[tuple[str, str, str], list[PlannedWorker]]:
    """Returns the workers on each device, by pool, host and device. pool: "" on a device that is of no pool of
    theirs."""
    pools = pools_of(config)
    names = pool_names(config)
    loads: dict[tuple[str, str, str], list[PlannedWorker]] = {}
    for worker in planned_workers(config, shape, measured_lengths(config, config.model.name)):
        pool = names.get(worker.service, "")
        for device in worker.devices:
            is_of_pool = pool and device in pools[pool].devices
            loads.setdefault((pool if is_of_pool else "", worker.host, device), []).append(worker)
    return loads


def _over_budget(pool: str, where: str, budget: int, sizes: Mapping[PlannedWorker, int], is_likely: bool) -> str:
    """Returns what is wrong about a device, and what to do. sizes: of its workers."""
    largest = max(sizes, key=sizes.__getitem__)
    total = size_text(sum(sizes.values()))
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
