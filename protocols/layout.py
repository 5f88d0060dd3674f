"""Rank arithmetic of 3D-parallel models."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """pp x tp x dp ranks, one worker each. rank = dp_index * (pp * tp) + pp_index * tp + tp_index (HybridFlow 5.3)."""

    pp: int = 1
    tp: int = 1
    dp: int = 1

    @property
    def size(self) -> int:
        return self.pp * self.tp * self.dp
