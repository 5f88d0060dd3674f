"""Regroups ranks that train a model to generate with it, without redundancy (HybridFlow, EuroSys 2025, section 5.3).

Ranks that generate together stand pp / p_g and tp / t_g apart, so that what a rank trains is a part of what it
generates with; it gathers the rest from its micro-data-parallel group alone.
"""

from dataclasses import dataclass
from typing import TypeAlias

from asyncrl.protocols.rank_layout import Layout

Cells: TypeAlias = frozenset[tuple[int, int]]
"""Parts of a model that is cut into stages and slices as training does: (stage, slice)."""


@dataclass(frozen=True, slots=True)
class Regrouping:
    """Tells what a rank generates with. layout: of training, with the sizes of generation. Raises
    ValueError for ranks that share out weights (`shard`) or experts (`ep`), which Table 2 does not cover."""

    layout: Layout

    def __post_init__(self) -> None:
        if self.layout.shard * self.layout.ep > 1:
            raise ValueError("ranks that share out weights (shard) or experts (ep) do not regroup: use dp and tp")

    def needed(self, rank: int) -> Cells:
        """Returns what a rank generates with: consecutive stages and slices."""
        layout = self.layout
        at = layout.place(rank)
        stages = layout.pp // layout.gpp
        slices = layout.tp // layout.gtp
        first_stage = at.pp // stages * stages
        first_slice = at.tp // slices * slices
        return frozenset(
            (stage, part)
            for stage in range(first_stage, first_stage + stages)
            for part in range(first_slice, first_slice + slices)
        )
