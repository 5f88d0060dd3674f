"""Rank arithmetic of 3D-parallel models: pp x tp x dp for training, and its regrouping for generation.

Training groups follow HybridFlow (EuroSys 2025) section 5.3: pipeline and tensor groups lie on consecutive ranks, data
groups at stride pp x tp. Ranks that share out the weights of a copy (`shard`), or its experts (`ep`), are data ranks,
side by side.
Ranks that share out the tokens of rows (`sp`) are consecutive, and count as one in all other indices.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

AxisOfExperts: TypeAlias = Literal["experts", "expert_copies"]
Axis: TypeAlias = (
    Literal["everyone", "rows", "copies", "shards", "tensor", "gathering", "stages", "ends", "sequence"] | AxisOfExperts
)
"""The axes along which ranks form groups, see `Layout.groups`."""
AXES: tuple[Axis, ...] = (
    *("everyone", "rows", "copies", "shards", "tensor", "gathering", "stages", "ends", "sequence"),
)
AXES_OF_EXPERTS: tuple[AxisOfExperts, ...] = ("experts", "expert_copies")
"""Axes of ranks that share out experts."""


class Place3D(NamedTuple):
    """Index of a rank inside its pipeline, tensor and data group; shards count as data ranks."""

    pp: int
    tp: int
    dp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """pp x tp x data ranks, one worker each. rank = data_index * (pp * tp) + pp_index * tp + tp_index (HybridFlow 5.3);
    with sp above one, rank = that * sp + sp_index.

    shard: ranks that hold a part of each weight of their stage and tensor rank, and train rows of their own, as FSDP
    does; data_index = (dp_index * shard + shard_index) * ep + ep_index. sp: ranks with the same weights and rows, each
    of which computes a slice of the tokens of every row. ep: ranks that share out the experts of each layer, hold the
    same of all other weights, and train rows of their own. generation_pp, generation_tp: sizes of the model in
    generation, divisors of pp and tp (None: as in training). Raises ValueError for sizes that do not fit.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    generation_pp: int | None = None
    generation_tp: int | None = None
    shard: int = 1
    sp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        sizes = {"pp": self.pp, "tp": self.tp, "dp": self.dp, "shard": self.shard, "sp": self.sp, "ep": self.ep}
        sizes |= {"generation pp": self.gpp, "generation tp": self.gtp}
        if min(sizes.values()) < 1:
            raise ValueError(f"every size of a layout is at least 1, not {sizes}")
        if self.pp % self.gpp or self.tp % self.gtp:
            raise ValueError(
                f"generation pp x tp = {self.gpp} x {self.gtp} must divide training pp x tp = {self.pp} x {self.tp}"
            )

    @property
    def size(self) -> int:
        return self.pp * self.tp * self.sp * self.data

    @property
    def data(self) -> int:
        """Returns the number of data ranks, each of which has rows of its own."""
        return self.dp * self.shard * self.ep

    @property
    def parts(self) -> int:
        """Returns the number of ranks that hold one copy of the model together."""
        return self.pp * self.tp * self.shard * self.ep

    def part(self, rank: int) -> int:
        """Returns which part of the model a rank holds, as ranks with copies of it do."""
        return rank // self.sp % self.parts

    @property
    def gpp(self) -> int:
        return self.pp if self.generation_pp is None else self.generation_pp

    @property
    def gtp(self) -> int:
        return self.tp if self.generation_tp is None else self.generation_tp

    def rank(self, pp: int = 0, tp: int = 0, dp: int = 0) -> int:
        """Returns the rank at these indices, dp among all data ranks; -1 is the last one. Of those that share out the
        tokens of its rows it is the first."""
        return ((dp % self.data) * self.pp * self.tp + (pp % self.pp) * self.tp + tp % self.tp) * self.sp

    def place(self, rank: int) -> Place3D:
        model = self.pp * self.tp
        number = rank // self.sp
        return Place3D(number % model // self.tp, number % self.tp, number // model)

    def generation_replicas(self) -> list[list[int]]:
        """Returns the ranks that generate together: dp x (p t / (p_g t_g)) groups of p_g x t_g ranks.

        Groups pick ranks at intervals of p / p_g and t / t_g, so that the training shard of each rank is a part of its
        generation shard (zero redundancy, HybridFlow 5.3).
        """
        every_pp = self.pp // self.gpp
        every_tp = self.tp // self.gtp
        groups: dict[tuple[int, int, int], list[int]] = {}
        for rank in range(self.size):
            at = self.place(rank)
            groups.setdefault((at.dp, at.pp % every_pp, at.tp % every_tp), []).append(rank)
        return list(groups.values())

    def groups(self, axis: Axis) -> list[list[int]]:
        """Returns the groups of ranks along an axis, which cover every rank once.

        everyone: all ranks. rows: ranks with the same part of the model and different rows. copies: those of them with
        the same weights, but for experts. shards: those of them whose parts make up the same weights. experts: those of
        them that share out the experts of one copy. expert_copies: those of them with the same experts. tensor: ranks
        that compute the same rows of the same stage together. gathering: ranks whose parts make up what each of them
        generates with (the micro-data-parallel groups of HybridFlow). stages: ranks that a row passes through, one a
        stage. ends: the first and the last of those; the others are alone. sequence: ranks that share out the tokens of
        the same rows.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            groups.setdefault(self._group(axis, rank), []).append(rank)
        return list(groups.values())

    def _group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        at = self.place(rank)
        slice_ = rank % self.sp
        match axis:
            case "everyone":
                return ()
            case "rows":
                return (at.pp, at.tp, slice_)
            case "copies":
                return (at.pp, at.tp, at.dp // self.ep % self.shard)
            case "shards":
                return (at.pp, at.tp, at.dp // (self.ep * self.shard), at.dp % self.ep, slice_)
            case "experts":
                return (at.pp, at.tp, at.dp // self.ep, slice_)
            case "expert_copies":
                return (at.pp, at.tp, at.dp % (self.ep * self.shard))
            case "tensor":
                return (at.pp, at.dp, slice_)
            case "gathering":
                return (at.dp, at.pp * self.gpp // self.pp, at.tp * self.gtp // self.tp, slice_)
            case "stages":
                return (at.tp, at.dp, slice_)
            case "ends":
                return (at.tp, at.dp, at.pp if 0 < at.pp < self.pp - 1 else 0, slice_)
            case "sequence":
                return (at.pp, at.tp, at.dp)
