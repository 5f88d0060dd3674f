"""Rank arithmetic of 3D-parallel models, its regrouping for generation, and the hosts on which ranks lie.

Training groups follow HybridFlow (EuroSys 2025) section 5.3: pipeline and tensor groups lie on consecutive ranks, data
groups at stride pp x tp. Ranks that share out the weights of a copy (`shard`), or its experts (`ep`), are data ranks,
side by side. Ranks that share out the tokens of rows (`sp`) are consecutive, and count as one in all other indices.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, TypeVar

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


# ---- on which hosts the ranks of a replica lie, and which of their groups cross a network --------------------------
#
#     rank = ((data rank * pp + stage) * tp + slice of layers) * sp + slice of rows
#
# Consecutive ranks share most, so they lie on one host: all ranks where one host has room for them, else each copy of
# the model, else each group inside of a copy. A group is cut only where no host has room for it.


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
