"""The cost of going from training to generation on the same ranks: HybridFlow (EuroSys 2025), Table 2.

All numbers are per rank, as fractions of the bytes of the whole model. `formula` is the printed table; `measured`
moves the shards of every rank and counts, so that the table can be checked.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal, NamedTuple

from asyncrl.protocols.rank_layout import Layout

System = Literal["DeepSpeed-Chat", "vanilla", "zero-redundancy"]
Cells = frozenset[tuple[int, int]]


class GenerationPlace(NamedTuple):
    """Index of a rank inside its generation pipeline and tensor group, its micro-data group and its data group."""

    pp: int
    tp: int
    micro_dp: int
    dp: int


@cache
def generation_places(layout: Layout) -> dict[int, GenerationPlace]:
    """Returns the place of every rank: those that generate together hold consecutive parts, in their order."""
    replicas = layout.generation_replicas()
    micro_dp = len(replicas) // layout.dp
    return {
        rank: GenerationPlace(part // layout.gtp, part % layout.gtp, number % micro_dp, number // micro_dp)
        for number, replica in enumerate(replicas)
        for part, rank in enumerate(replica)
    }


@dataclass(frozen=True, slots=True)
class Transition:
    """volume: received by a rank; peak: parameters it holds at one time for generation; redundancy: of its training
    shard, what generation has no use for and memory must hold beside it."""

    volume: Fraction
    peak: Fraction
    redundancy: Fraction


def formula(system: System, layout: Layout) -> Transition:
    """Returns Table 2. The redundancy of `vanilla` is that of its worst ranks, whose two shards do not overlap."""
    model, ranks = layout.pp * layout.tp, layout.size
    whole, shard = Fraction(1), Fraction(1, model)
    if system == "DeepSpeed-Chat":
        return Transition(Fraction(ranks - 1, ranks), whole, Fraction(1, ranks))
    if system == "vanilla":
        return Transition(whole - shard, whole, shard)
    generation = layout.gpp * layout.gtp
    return Transition(Fraction(model - generation, generation * model), Fraction(1, generation), Fraction(0))


def training_groups(layout: Layout, within: str) -> list[list[int]]:
    """Returns the ranks that differ in this index of their place ("pp", "tp" or "dp") only, rising."""
    return _groups(layout, lambda rank: layout.place(rank)._replace(**{within: 0}))


def generation_groups(layout: Layout, within: str) -> list[list[int]]:
    """Returns the ranks that differ in this index of their place in generation only; "micro_dp": the ranks of one
    training replica that hold the same part of the model in generation."""
    return _groups(layout, lambda rank: generation_places(layout)[rank]._replace(**{within: 0}))


def _groups(layout: Layout, key: Callable[[int], Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for rank in range(layout.size):
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())


def training_cells(layout: Layout, rank: int) -> Cells:
    """Returns the part of a model cut into pp x tp cells that a rank holds in training."""
    place = layout.place(rank)
    return frozenset([(place.pp, place.tp)])


def generation_cells(layout: Layout, rank: int) -> Cells:
    """Returns the part that a rank needs in generation: consecutive stages and tensor slices of training."""
    place, stages, slices = generation_places(layout)[rank], layout.pp // layout.gpp, layout.tp // layout.gtp
    return frozenset(
        (stage, part)
        for stage in range(place.pp * stages, (place.pp + 1) * stages)
        for part in range(place.tp * slices, (place.tp + 1) * slices)
    )


def measured(layout: Layout) -> list[Transition]:
    """Counts the cost by rank of an all-gather inside each micro-data group, which is just what the rank needs."""
    groups = generation_groups(layout, "micro_dp")
    gathered = {
        rank: frozenset().union(*(training_cells(layout, r) for r in group)) for group in groups for rank in group
    }
    return [_counted(layout, rank, gathered[rank]) for rank in range(layout.size)]


def _counted(layout: Layout, rank: int, gathered: Cells) -> Transition:
    own, needed, cell = training_cells(layout, rank), generation_cells(layout, rank), Fraction(1, layout.pp * layout.tp)
    assert needed <= gathered, f"rank {rank} misses {sorted(needed - gathered)} for generation"
    return Transition(len(gathered - own) * cell, len(gathered) * cell, len(own - needed) * cell)
