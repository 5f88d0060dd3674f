"""Set partitions of roles, and how many GPUs the sets get: the enumerations of HybridFlow's algorithm 1."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TypeAlias, TypeVar

from asyncrl.simulation.mapping.job_file import GpuGroup
from asyncrl.simulation.mapping.strategies import powers

T = TypeVar("T")
Sets: TypeAlias = tuple[tuple[str, ...], ...]
"""Roles that share GPUs, for each set of GPUs."""


def set_partitions(items: Sequence[T]) -> Iterator[tuple[tuple[T, ...], ...]]:
    """Yields every way to divide items into sets: Bell(4) = 15 for the four models of PPO."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
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
