"""On which hosts the ranks of a replica lie, and which of their groups cross a network.

    rank = ((data rank * pp + stage) * tp + slice of layers) * sp + slice of rows      see protocols/rank_layout.py

Consecutive ranks share most, so they lie on one host: all ranks where one host has room for them, else each copy of the
model, else each group inside of a copy. A group is cut only where no host has room for it.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from asyncrl.protocols.rank_layout import Axis, Layout

H = TypeVar("H", bound=Hashable)

WHAT_CROSSES: Mapping[Axis, tuple[str, str]] = {
    "sequence": ("sp", "the keys and values of every layer, which slices of a row exchange,"),
    "tensor": ("tp", "the sums of every layer"),
    "stages": ("pp", "the activations between stages"),
    "experts": ("ep", "the tokens of every layer, on their way to experts,"),
    "shards": ("shard", "the weights of every layer, which are gathered for each pass,"),
    "copies": ("dp", "the sums of gradients, once in a step,"),
}
"""The key of the layout that makes groups along an axis, and what the ranks of such a group send each other."""


def hosts_of_ranks(layout: Layout, room: Mapping[H, int], placed: Mapping[int, H]) -> list[H]:
    """Returns the host of each rank. room: further ranks that each host takes, in the order of preference; together as
    many as `layout` needs. placed: ranks that run already, whose hosts stay."""
    free = dict(room)
    found = dict(placed)
    assert sum(free.values()) + len(found) >= layout.size, "the caller waits for enough room"

    def place(first: int, sizes: Sequence[int]) -> None:
        """Places so many ranks on one host, or else in groups of the next smaller size."""
        missing = [rank for rank in range(first, first + sizes[0]) if rank not in found]
        there = {found[rank] for rank in range(first, first + sizes[0]) if rank in found}
        host = next((each for each in free if free[each] >= len(missing) and there <= {each}), None)
        if host is not None:
            free[host] -= len(missing)
            found.update(dict.fromkeys(missing, host))
        elif missing:
            starts = range(first, first + sizes[0], sizes[1])
            # A host keeps the room that ranks need whose neighbours run there.
            for start in sorted(starts, key=lambda each: found.keys().isdisjoint(range(each, each + sizes[1]))):
                place(start, sizes[1:])

    model = layout.pp * layout.tp * layout.sp
    place(0, (layout.size, layout.parts * layout.sp, model * layout.ep, model, layout.tp * layout.sp, layout.sp, 1))
    return [found[rank] for rank in range(layout.size)]


def crossings(service: str, layout: Layout, hosts: Sequence[str]) -> Iterator[str]:
    """Yields a sentence for each kind of groups of ranks that lie on several hosts, the ones that send most first.
    hosts: the name of the host of each rank."""
    for axis, (key, what) in WHAT_CROSSES.items():
        groups = layout.groups(axis) if getattr(layout, key) > 1 else []
        if cut := [ranks for ranks in groups if len({hosts[rank] for rank in ranks}) > 1]:
            where = ", ".join(
                f"{_ranks([rank for rank in cut[0] if hosts[rank] == host])} on {host}"
                for host in dict.fromkeys(hosts[rank] for rank in cut[0])
            )
            those = f"its group of ranks crosses hosts ({where})"
            if len(groups) > 1:
                some = f"{len(cut)} of {len(groups)} groups of ranks"
                those = f"{some} cross{'es' if len(cut) == 1 else ''} hosts (the first one: {where})"
            yield f"{service}.layout.{key} = {getattr(layout, key)}: {those}, so {what} cross the network"


def _ranks(ranks: Sequence[int]) -> str:
    """Returns numbers such as "ranks 0 to 7", or "rank 3"."""
    if ranks[-1] - ranks[0] == len(ranks) - 1 > 0:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
