"""Regroups ranks that train a model to generate with it (HybridFlow, EuroSys 2025, section 5.3).

    training          rank = data index x (pp x tp) + stage x tp + slice; each rank holds one of pp x tp cells
    vanilla           those that generate together are consecutive; all ranks of a replica gather the whole model
    zero-redundancy   those that generate together stand pp / p_g and tp / t_g apart, so that what a rank trains is a
                      part of what it generates with; it gathers the rest from its micro-data-parallel group alone

Costs count tensors that training cuts. What all ranks of a replica hold whole (norms, and here embedding and head of
tensor-parallel layers) crosses no wire under either grouping: it belongs to neither the volume nor the M of Table 2.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

from asyncrl.protocols.rank_layout import Layout

Grouping: TypeAlias = Literal["zero-redundancy", "vanilla"]
Cells: TypeAlias = frozenset[tuple[int, int]]
"""Parts of a model that is cut into stages and slices as training does: (stage, slice)."""


class GenerationPlace(NamedTuple):
    """Index of a rank inside its generation pipeline and tensor group, among the generation replicas of its training
    replica, and among those."""

    pp: int
    tp: int
    micro_dp: int
    dp: int


@dataclass(frozen=True, slots=True)
class Transition:
    """Holds what the change to generation costs a rank, in parts of the model. volume: received; peak: held at one time
    for generation; redundancy: of its training shard, what generation has no use for and memory holds beside it."""

    volume: Fraction
    peak: Fraction
    redundancy: Fraction


@dataclass(frozen=True, slots=True)
class Regrouping:
    """Tells who generates with whom, and who gathers what. layout: of training, with the sizes of generation. Raises
    ValueError for ranks that share out weights (`shard`) or experts (`ep`), which Table 2 does not cover."""

    layout: Layout
    grouping: Grouping = "zero-redundancy"

    def __post_init__(self) -> None:
        if self.layout.shard * self.layout.ep > 1:
            raise ValueError("ranks that share out weights (shard) or experts (ep) do not regroup: use dp and tp")

    def place(self, rank: int) -> GenerationPlace:
        layout = self.layout
        at = self.layout.place(rank)
        every_pp = layout.pp // layout.gpp
        every_tp = layout.tp // layout.gtp
        if self.grouping == "zero-redundancy":
            micro_dp = at.pp % every_pp * every_tp + at.tp % every_tp
            return GenerationPlace(at.pp // every_pp, at.tp // every_tp, micro_dp, at.dp)
        number = rank % (layout.pp * layout.tp)
        replica, part = divmod(number, layout.gpp * layout.gtp)
        return GenerationPlace(*divmod(part, layout.gtp), replica, at.dp)

    def replicas(self) -> list[list[int]]:
        """Returns the ranks that generate together."""
        return self._groups(lambda rank: (self.place(rank).dp, self.place(rank).micro_dp))

    def gathering(self) -> list[list[int]]:
        """Returns the groups of ranks that gather from each other, one all-gather in each."""
        if self.grouping == "zero-redundancy":
            return self.layout.groups("gathering")
        return self._groups(lambda rank: self.layout.place(rank).dp)

    def held(self, rank: int) -> Cells:
        """Returns what a rank holds in training."""
        at = self.layout.place(rank)
        return frozenset([(at.pp, at.tp)])

    def needed(self, rank: int) -> Cells:
        """Returns what a rank generates with: consecutive stages and slices."""
        layout = self.layout
        at = self.place(rank)
        stages = layout.pp // layout.gpp
        slices = layout.tp // layout.gtp
        return frozenset(
            (stage, part)
            for stage in range(at.pp * stages, (at.pp + 1) * stages)
            for part in range(at.tp * slices, (at.tp + 1) * slices)
        )

    def gathered(self, rank: int) -> Cells:
        """Returns what the all-gather of a rank brings together, its own cell included."""
        group = next(group for group in self.gathering() if rank in group)
        return frozenset().union(*(self.held(other) for other in group))

    def cost(self, rank: int) -> Transition:
        """Counts the cost at a rank, of cells of equal size."""
        cell = Fraction(1, self.layout.pp * self.layout.tp)
        own = self.held(rank)
        needed = self.needed(rank)
        gathered = self.gathered(rank)
        assert needed <= gathered, f"rank {rank} misses {sorted(needed - gathered)} for generation"
        return Transition(len(gathered - own) * cell, len(gathered) * cell, len(own - needed) * cell)

    def _groups(self, key: Callable[[int], Hashable]) -> list[list[int]]:
        groups: dict[Hashable, list[int]] = {}
        for rank in range(self.layout.size):
            groups.setdefault(key(rank), []).append(rank)
        return list(groups.values())
