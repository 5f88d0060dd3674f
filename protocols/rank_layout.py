"""Rank arithmetic of 3D-parallel models: pp x tp x dp for training, and its regrouping for generation.

Training groups follow HybridFlow (EuroSys 2025) section 5.3: pipeline and tensor groups lie on consecutive ranks, data
groups at stride pp x tp.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Place3D(NamedTuple):
    """Index of a rank inside its pipeline, tensor and data group."""

    pp: int
    tp: int
    dp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """pp x tp x dp ranks, one worker each. rank = dp_index * (pp * tp) + pp_index * tp + tp_index (HybridFlow 5.3).

    generation_pp, generation_tp: sizes of the model in generation, divisors of pp and tp (None: as in training).
    Raises ValueError for sizes that do not fit.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    generation_pp: int | None = None
    generation_tp: int | None = None

    def __post_init__(self) -> None:
        sizes = {"pp": self.pp, "tp": self.tp, "dp": self.dp, "generation pp": self.gpp, "generation tp": self.gtp}
        if min(sizes.values()) < 1:
            raise ValueError(f"every size of a layout is at least 1, not {sizes}")
        if self.pp % self.gpp or self.tp % self.gtp:
            raise ValueError(
                f"generation pp x tp = {self.gpp} x {self.gtp} must divide training pp x tp = {self.pp} x {self.tp}"
            )

    @property
    def size(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def gpp(self) -> int:
        return self.pp if self.generation_pp is None else self.generation_pp

    @property
    def gtp(self) -> int:
        return self.tp if self.generation_tp is None else self.generation_tp

    def rank(self, pp: int = 0, tp: int = 0, dp: int = 0) -> int:
        """Returns the rank at these indices; -1 is the last one."""
        return (dp % self.dp) * self.pp * self.tp + (pp % self.pp) * self.tp + tp % self.tp

    def place(self, rank: int) -> Place3D:
        model = self.pp * self.tp
        return Place3D(rank % model // self.tp, rank % self.tp, rank // model)

    def generation_replicas(self) -> list[list[int]]:
        """Returns the ranks that generate together: dp x (p t / (p_g t_g)) groups of p_g x t_g ranks.

        Groups pick ranks at intervals of p / p_g and t / t_g, so that the training shard of each rank is a part of its
        generation shard (zero redundancy, HybridFlow 5.3).
        """
        every_pp, every_tp = self.pp // self.gpp, self.tp // self.gtp
        groups: dict[tuple[int, int, int], list[int]] = {}
        for rank in range(self.size):
            at = self.place(rank)
            groups.setdefault((at.dp, at.pp % every_pp, at.tp % every_tp), []).append(rank)
        return list(groups.values())
