"""HybridFlow's algorithm 1: the best of all placements and allocations, with one table of costs for each set of roles.

    iteration     c = sum over stages of the slowest set in it                 (d_cost of the paper)
    asynchronous  max(busiest set, c / (limit + 1)): services overlap, and at most limit + 1 batches are on their way
                  at one time (Little's law)

The cost of a set depends only on its roles, its kind of GPU and their number, so that every answer is looked up in a
cache that all placements share, and all allocations of a placement are evaluated at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from asyncrl.errors import ConfigError
from asyncrl.simulation.planning.gpus import Rates
from asyncrl.simulation.planning.job_file import GpuGroup, PlannedJob
from asyncrl.simulation.planning.predictions import USABLE, Interval
from asyncrl.simulation.planning.strategies import (
    PUBLISHED,
    STAGES,
    Layouts,
    Strategy,
    auto_parallel,
    powers,
    stage_seconds,
)

Table: TypeAlias = npt.NDArray[np.float64]
MOST_ALLOCATIONS = 2_000_000
"""Allocations of one placement that are evaluated; beyond, sets get hosts by twos, by fours and so on."""
T = TypeVar("T")
Sets: TypeAlias = tuple[tuple[str, ...], ...]
"""Roles that share GPUs, for each set of GPUs."""


def set_partitions(items: Sequence[T]) -> Iterator[tuple[tuple[T, ...], ...]]:
    """Yields every way to divide items into sets: Bell(4) = 15 for the four models of PPO."""
    if not items:
        yield ()
        return
    first = items[0]
    rest = items[1:]
    for partition in set_partitions(rest):
        yield ((first,), *partition)
        for index, each in enumerate(partition):
            yield (*partition[:index], (first, *each), *partition[index + 1 :])


def group_choices(sets: int, groups: int) -> Iterator[tuple[int, ...]]:
    """Yields the group of GPUs of each set, in every way."""
    return product(range(groups), repeat=sets)


def sizes(group: GpuGroup, every: int = 1) -> list[int]:
    """Returns the numbers of GPUs that a set may have: powers of two inside of a host, and whole hosts. every: of the
    whole hosts only each so many, and all of them."""
    hosts = [count * group.each for count in range(1, len(group.hosts) + 1) if count % every == 0]
    return sorted({*powers(group.each), *hosts, group.each, group.count})


@dataclass(frozen=True)
class PlacedSet:
    """Roles that share GPUs of one group, and the strategy of each."""

    roles: tuple[str, ...]
    group: GpuGroup
    gpus: int
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True)
class FoundMapping:
    """A placement with its allocation. cost: likely seconds, by the objective of the job."""

    job: PlannedJob
    sets: tuple[PlacedSet, ...]
    cost: float

    @property
    def name(self) -> str:
        """Returns the sets in one line."""
        return " | ".join(f"{' + '.join(each.roles)}: {each.gpus} {each.group.name}" for each in self.sets)

    @cached_property
    def predicted(self) -> Interval:
        """Returns the cost at all levels of efficiency."""
        return Interval.of([self.cost_at(level) for level in range(3)])

    def stages_of(self, placed: PlacedSet, rates: Rates) -> Table:
        """Returns the seconds of a set in each stage."""
        job = self.job
        each = [
            stage_seconds(role, job.sizes[role], strategy, job.work, rates)
            for role, strategy in zip(placed.roles, placed.strategies, strict=True)
        ]
        total: Table = np.array(each).sum(axis=0)
        return total

    def cost_at(self, level: int) -> float:
        table = np.array([self.stages_of(each, each.group.gpu.levels[level]) for each in self.sets])
        return float(cost(list(table), self.job))

    @property
    def slowest(self) -> tuple[str, PlacedSet]:
        """Returns the stage and the set that take longest."""
        found = [
            (float(seconds), stage, placed)
            for placed in self.sets
            for stage, seconds in zip(STAGES, self.stages_of(placed, placed.group.gpu.likely), strict=True)
        ]
        return max(found, key=lambda each: each[0])[1:]


def cost(stages: Sequence[Any], job: PlannedJob) -> Any:
    """Returns the objective of a job. stages: for each set an array whose last axis is the stages."""
    slowest = stages[0]
    busiest = stages[0].sum(axis=-1)
    for each in stages[1:]:
        slowest = np.maximum(slowest, each)
        busiest = np.maximum(busiest, each.sum(axis=-1))
    cycle = slowest.sum(axis=-1)
    return cycle if job.tables.objective == "iteration" else np.maximum(busiest, cycle / (job.work.limit + 1))


class MappingSearch:
    """Searches the mappings of one job. known: layouts that may be taken. looked_up: strategies that were
    computed. considered: allocations."""

    def __init__(self, job: PlannedJob, known: Layouts = PUBLISHED) -> None:
        self.job = job
        self.known = known
        self.looked_up = 0
        self.considered = 0
        self._strategies: dict[tuple[str, int, int, float], Strategy | None] = {}
        self._placed: dict[tuple[tuple[str, ...], int, int], tuple[Table, tuple[Strategy, ...]] | None] = {}

    def best(self) -> list[FoundMapping]:
        """Returns the best allocation of each placement, the best placement first. Raises ConfigError when no placement
        fits into memory."""
        roles = tuple(self.job.sizes)
        found = [each for sets in set_partitions(roles) if (each := self.best_of(sets)) is not None]
        if not found:
            raise ConfigError(
                f"{', '.join(roles)} fit on {self.job.count} GPUs in no placement: add GPUs, or take smaller models"
            )
        return sorted(found, key=lambda each: each.cost)

    def best_of(self, sets: Sets) -> FoundMapping | None:
        """Returns the best allocation of one placement over all groups of GPUs; None where no one fits."""
        best: FoundMapping | None = None
        for groups in group_choices(len(sets), len(self.job.groups)):
            found = self._best_allocation(sets, groups)
            if found is not None and (best is None or found.cost < best.cost):
                best = found
        return best

    def minimal(self, roles: tuple[str, ...], group: int) -> int | None:
        """Returns the fewest GPUs on which the roles fit; None where all are too few (get_min_alloc)."""
        return next((size for size in sizes(self.job.groups[group]) if self.placed(roles, group, size)), None)

    def placed(self, roles: tuple[str, ...], group: int, gpus: int) -> tuple[Table, tuple[Strategy, ...]] | None:
        """Returns the seconds of each stage and the strategies of roles that share so many GPUs; None: no layout fits.

        Each role may fill its share of the memory.
        """
        key = roles, group, gpus
        if key not in self._placed:
            self._placed[key] = self._place(roles, group, gpus)
        return self._placed[key]

    def _place(self, roles: tuple[str, ...], group: int, gpus: int) -> tuple[Table, tuple[Strategy, ...]] | None:
        job = self.job
        gpu = self.job.groups[group].gpu
        sizes = {role: job.sizes[role] for role in roles}
        for budgets in self.known.budgets(sizes, job.work, USABLE * gpu.memory):
            tried = (self._strategy(role, group, gpus, budget) for role, budget in zip(roles, budgets, strict=True))
            found = [each for each in tried if each is not None]
            if len(found) == len(roles):
                break
        else:
            return None
        stages = [
            stage_seconds(role, job.sizes[role], strategy, job.work, gpu.likely)
            for role, strategy in zip(roles, found, strict=True)
        ]
        return np.array(stages).sum(axis=0), tuple(found)

    def _strategy(self, role: str, group: int, gpus: int, budget: float) -> Strategy | None:
        key = role, group, gpus, budget
        if key not in self._strategies:
            self.looked_up += 1
            gpu = self.job.groups[group].gpu
            self._strategies[key] = auto_parallel(
                *(role, self.job.sizes[role], gpus, budget, gpu, self.job.work),
                self.job.tables.layouts.get(role),
                self.known,
            )
        return self._strategies[key]

    def _best_allocation(self, sets: Sets, groups: tuple[int, ...]) -> FoundMapping | None:
        """Evaluates all allocations at once. The last set of each group gets what the others leave."""
        options = self._options(sets, groups)
        if any(not each for each in options):
            return None
        shape = [len(each) for each in options]
        axes = np.indices(shape, sparse=True) if shape else []
        counts: list[Any] = []
        free = iter(zip(options, axes, strict=True))
        left: dict[int, Any] = {group: self.job.groups[group].count for group in groups}
        for index, group in enumerate(groups):
            if group in groups[index + 1 :]:
                values, axis = next(free)
                counts.append(np.array(values)[axis])
                left[group] = left[group] - counts[-1]
            else:
                counts.append(np.maximum(np.asarray(left[group]), 0))
        stages = [self._table(roles, group)[count] for roles, group, count in zip(sets, groups, counts, strict=True)]
        costs = np.asarray(cost(stages, self.job))
        self.considered += costs.size
        where = np.unravel_index(int(costs.argmin()), costs.shape)
        if not np.isfinite(least := float(costs[where])):
            return None
        chosen = [int(np.broadcast_to(count, costs.shape)[where]) for count in counts]
        return FoundMapping(self.job, tuple(self._placed_sets(sets, groups, chosen)), least)

    def _options(self, sets: Sets, groups: tuple[int, ...]) -> list[list[int]]:
        """Returns the numbers of GPUs of each set but the last one of each group, from the fewest that fit upwards."""
        every = 1
        while True:
            found = []
            for index, (roles, group) in enumerate(zip(sets, groups, strict=True)):
                if group in groups[index + 1 :]:
                    least = self.minimal(roles, group)
                    found.append(
                        [] if least is None else [n for n in sizes(self.job.groups[group], every) if n >= least]
                    )
            if np.prod([len(each) for each in found], dtype=float) <= MOST_ALLOCATIONS:
                return found
            every *= 2

    def _table(self, roles: tuple[str, ...], group: int) -> Table:
        """Returns the seconds of a set by its number of GPUs and stage; infinite where it does not fit."""
        table = np.full((self.job.groups[group].count + 1, len(STAGES)), np.inf)
        for gpus in sizes(self.job.groups[group]):
            if (placed := self.placed(roles, group, gpus)) is not None:
                table[gpus] = placed[0]
        return table

    def _placed_sets(self, sets: Sets, groups: Sequence[int], chosen: Sequence[int]) -> Iterator[PlacedSet]:
        for roles, group, gpus in zip(sets, groups, chosen, strict=True):
            placed = self.placed(roles, group, gpus)
            assert placed is not None, f"{roles} were chosen on {gpus} GPUs, where they do not fit"
            yield PlacedSet(roles, self.job.groups[group], gpus, placed[1])
