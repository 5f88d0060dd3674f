"""Gathers the weights that a rank generates with from ranks that train other parts of the same model.

    shards    parts of each tensor      ──┐
    tensor    slices of a layer         ──┼── all-gathers ──> what this rank generates with
    stages    some of the layers        ──┘

Everything moves in buckets, so that memory holds what is generated with and one bucket, but no second copy of it.
What ranks hold whole is not gathered from those that hold the same.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncrl.config.schema import GenerationConfig
from asyncrl.engines.ranks.pipeline import held_tensors, owner_of
from asyncrl.engines.ranks.rank_mesh import RankMesh, Ranks
from asyncrl.engines.ranks.shards import (
    axes_cut,
    cut_dim,
    is_part,
    is_split,
    own_part,
    own_ranges,
    rows_of_shards,
)
from asyncrl.lanes.weights.plan.regrouping import Regrouping
from asyncrl.lanes.weights.slot_memory import DTYPES, WeightsSpec
from asyncrl.protocols.rank_layout import Layout

BUCKET_BYTES = 32 << 20
"""Bytes of one rank in a bucket: an exchange takes far longer than its start, and eight ranks fill 256 MB."""


class OwnSlice(NamedTuple):
    """A rank's slice of a tensor that is cut along `dim`. stage: that has the tensor; of other stages than this rank's
    the slice is on the meta device."""

    part: Tensor
    dim: int
    stage: int = 0


class WeightGathering:
    """Gathers slices for one rank. group: the ranks that it gathers from, itself among them. stages: whose
    tensors the rank generates with, where the regrouping does not tell. received: bytes that came
    from other ranks."""

    def __init__(self, regrouping: Regrouping, rank: int, group: Ranks, stages: Collection[int] | None = None) -> None:
        members = next(ranks for ranks in regrouping.layout.groups("gathering") if rank in ranks)
        assert group.size == len(members), f"{group.size} ranks connected where {len(members)} gather"
        self._cells = [(at.pp, at.tp) for at in map(regrouping.layout.place, members)]
        needed = regrouping.needed(rank) if stages is None else [(stage, 0) for stage in stages]
        self._needed = sorted(needed)
        self._group = group
        self.received = 0

    def gather(self, slices: Mapping[str, OwnSlice], dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns what this rank generates with, in this dtype: its own slices where it is alone. All ranks of the
        group call it with slices of the same tensors in the same order. Raises PeerLost when one of them is gone."""
        present = {stage for stage, _ in self._cells}
        slices = {name: each for name, each in slices.items() if each.stage in present}
        if self._group.size == 1:
            return {name: part.detach().to(dtype) for name, (part, _, _) in slices.items()}
        made: dict[str, Tensor] = {}
        for bucket in _buckets(slices, dtype.itemsize):
            parts = self._exchanged(bucket, dtype)
            stage = next(iter(bucket.values())).stage
            sources = [cell for cell in self._needed if cell[0] == stage]
            start = 0
            for name, (part, dim, _) in bucket.items():
                stop = start + part.numel()
                if sources:
                    made[name] = torch.cat([parts[cell][start:stop].view(part.shape) for cell in sources], dim)
                start = stop
        return made

    def _exchanged(self, bucket: Mapping[str, OwnSlice], dtype: torch.dtype) -> dict[tuple[int, int], Tensor]:
        """Returns the slices of each member with the stage of a bucket, one after the other, by stage and slice."""
        stage = next(iter(bucket.values())).stage
        own = self._cells[self._group.rank]
        givers = [place for place, cell in enumerate(self._cells) if cell[0] == stage]
        flat = _flat([each.part for each in bucket.values()], dtype)
        self.received += (len(givers) - (own[0] == stage)) * flat.numel() * dtype.itemsize
        if len(givers) == self._group.size:
            gathered = self._group.gather_equal(flat.view(torch.uint8))
        else:
            gathered = [self._group.shared(flat.view(torch.uint8), place) for place in givers]
        return {self._cells[place]: each.view(dtype) for place, each in zip(givers, gathered, strict=True)}


def regrouping_of(layout: Layout, generation: GenerationConfig) -> Regrouping:
    """Returns who generates with whom, of the ranks of a trainer. Those that share out weights or experts are data
    ranks here: each has joined its slices."""
    pp = generation.layout.pp
    tp = generation.layout.tp
    copies = replace(layout, dp=layout.data, shard=1, ep=1, generation_pp=pp, generation_tp=tp)
    return Regrouping(copies)


def gather_for_generation(
    tensors: Mapping[str, Any], spec: WeightsSpec, regrouping: Regrouping, mesh: RankMesh
) -> tuple[dict[str, Tensor], int]:
    """Returns the tensors of a specification in its dtype, or those slices of them that this rank generates with, and
    the bytes received for them. What this rank generates with as it holds it is no copy where it has that dtype. Raises
    PeerLost when another rank is gone."""
    dtype = DTYPES[spec.dtype]
    named = {each.name: tensors[each.name] for each in spec.tensors}
    held = held_tensors(named)
    own, received = _joined_shards(held, dtype, mesh.shards)
    cut = {name: cut_dim(each) for name, each in held.items() if is_split(each)}
    if mesh.stages.size > 1:
        owners = {name: owner_of(each) for name, each in named.items()}
        made, received_slices = _of_stages(own, owners, cut, regrouping, mesh)
        return made, received + received_slices
    if not cut:
        return own, received
    gathering = WeightGathering(regrouping, mesh.rank, mesh.gathering)
    gathered = gathering.gather({name: OwnSlice(own[name], dim) for name, dim in cut.items()}, dtype)
    return {**own, **gathered}, received + gathering.received


@dataclass(frozen=True, eq=False)
class TrainedWeights:
    """The weights that a rank trains, beside what it gathered to generate with. model: as it trains. moved: called
    after weights moved in memory, which the optimizer holds too."""

    model: nn.Module
    moved: Callable[[], None]

    def hold_once(self, gathered: dict[str, Tensor]) -> None:
        """Lets memory hold once what this rank trains and generates with, where both have one dtype, until
        `hold_apart`. Slices of tensor ranks become views of what was gathered; in place of copies of whole tensors
        `gathered` gets those that train."""
        for name, parameter in self.model.named_parameters():
            whole = gathered.get(name)
            if whole is None or (whole.dtype, whole.device) != (parameter.dtype, parameter.device):
                continue
            if not axes_cut(parameter):
                gathered[name] = own_part(parameter.detach())
            elif axes_cut(parameter) == {"tp"} and is_part(parameter):
                parameter._local_tensor = _slice_of_own(whole, parameter)
        self.moved()

    def hold_apart(self) -> None:
        """Gives the views memory of their own, before a step, which changes them."""
        for parameter in self.model.parameters():
            part = own_part(parameter.detach())
            if axes_cut(parameter) == {"tp"} and is_part(parameter) and not part.is_meta:
                parameter._local_tensor = _alone(part)
        self.moved()

    def held_twice(self, gathered: Mapping[str, Tensor]) -> int:
        """Returns the bytes of which `gathered` has a copy of the same dtype in other memory."""
        parts = {name: own_part(each.detach()) for name, each in self.model.named_parameters() if name in gathered}
        return sum(
            part.nbytes
            for name, part in parts.items()
            if part.dtype == gathered[name].dtype
            and not part.is_meta
            and part.untyped_storage().data_ptr() != gathered[name].untyped_storage().data_ptr()
        )


def _slice_of_own(gathered: Tensor, parameter: Tensor) -> Tensor:
    """Returns what a rank trains of consecutive slices that it gathered, its own among them."""
    dim = cut_dim(parameter)
    ranges = own_ranges(parameter)
    start = ranges[dim].start % gathered.size(dim)
    return gathered.narrow(dim, start, ranges[dim].stop - ranges[dim].start)


def _alone(part: Tensor) -> Tensor:
    is_view = part.untyped_storage().nbytes() > part.nbytes
    return part.clone(memory_format=torch.contiguous_format) if is_view else part


def _joined_shards(held: Mapping[str, Tensor], dtype: torch.dtype, shards: Ranks) -> tuple[dict[str, Tensor], int]:
    """Returns what ranks hold together that share out each tensor, cut at most by tensor ranks, and the bytes
    received."""
    if shards.size == 1:
        return {name: own_part(each).detach().to(dtype) for name, each in held.items()}, 0
    made: dict[str, Tensor] = {}
    received = 0
    padded = {name: OwnSlice(_padded(each, shards.size), 0) for name, each in held.items()}
    for bucket in _buckets(padded, dtype.itemsize):
        flat = _flat([part for part, _, _ in bucket.values()], dtype)
        gathered = [each.view(dtype) for each in shards.gather_equal(flat.view(torch.uint8))]
        received += (shards.size - 1) * flat.numel() * dtype.itemsize
        start = 0
        for name, (part, _, _) in bucket.items():
            stop = start + part.numel()
            whole = torch.cat([each[start:stop].view(part.shape) for each in gathered])
            made[name] = whole[: rows_of_shards(held[name])]
            start = stop
    return made, received


def _padded(tensor: Tensor, shards: int) -> Tensor:
    """Returns this rank's part with as many rows as the first shard has; the last ones may have fewer."""
    part = own_part(tensor).detach()
    missing = -(-rows_of_shards(tensor) // shards) - len(part)
    return part if missing == 0 else torch.cat([part, part.new_zeros((missing, *part.shape[1:]))])


def _of_stages(
    own: Mapping[str, Tensor], owners: Mapping[str, int], cut: Mapping[str, int], regrouping: Regrouping, mesh: RankMesh
) -> tuple[dict[str, Tensor], int]:
    """Returns the tensors of the stages that this rank generates with, and the bytes received. own: those that this
    rank holds; owners: stages that give them; cut: dimension of each that tensor ranks hold slices of. Slices come from
    all ranks that hold them, others from the same tensor rank of each stage."""
    described = [
        [name, cut.get(name), list(each.shape), owners[name] == mesh.stages.rank] for name, each in own.items()
    ]
    slices: dict[str, OwnSlice] = {}
    wholes: dict[str, OwnSlice] = {}
    copies: dict[str, OwnSlice] = {}  # An embedding that is the head too, at the last stage.
    for stage in range(mesh.stages.size):
        for name, dim, shape, is_owned in mesh.stages.told(described, stage):
            part = own[name] if stage == mesh.stages.rank else torch.empty(shape, device="meta")
            chosen = copies if not is_owned else wholes if dim is None else slices
            chosen[name] = OwnSlice(part, dim or 0, stage)
    dtype = next(iter(own.values())).dtype
    along = partial(_along_stages, regrouping, mesh)
    gatherings = [(along(), wholes)]
    gatherings += [(along(), copies)] if copies and regrouping.layout.gpp > 1 else []
    gatherings += [(WeightGathering(regrouping, mesh.rank, mesh.gathering), slices)] if slices else []
    made: dict[str, Tensor] = {}
    for gathering, parts in gatherings:
        made |= gathering.gather(parts, dtype)
    return made, sum(gathering.received for gathering, _ in gatherings)


def _along_stages(regrouping: Regrouping, mesh: RankMesh) -> WeightGathering:
    """Returns what gathers whole tensors of stages: from those of them alone that this rank generates with, where these
    ranks have a group."""
    stages = {stage for stage, _ in regrouping.needed(mesh.rank)}
    layout = regrouping.layout
    has_group = layout.gtp == layout.tp
    along = Regrouping(Layout(pp=layout.pp, generation_pp=layout.gpp if has_group else 1))
    return WeightGathering(along, mesh.stages.rank, mesh.gathering if has_group else mesh.stages, stages)


def _flat(parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns all elements one after the other; of parts that this rank does not have, memory for them."""
    flat = [each.detach().flatten() for each in parts]
    if any(each.is_meta for each in flat):
        return torch.empty(sum(each.numel() for each in flat), dtype=dtype)
    return torch.cat([each.to(dtype) for each in flat])


def _buckets(slices: Mapping[str, OwnSlice], item_bytes: int) -> Iterator[dict[str, OwnSlice]]:
    """Groups slices of a stage in order into buckets of at most BUCKET_BYTES, or of one larger slice."""
    bucket: dict[str, OwnSlice] = {}
    size = 0
    stage = 0
    for name, each in slices.items():
        own = each.part.numel() * item_bytes
        if bucket and (size + own > BUCKET_BYTES or each.stage != stage):
            yield bucket
            bucket = {}
            size = 0
        bucket[name] = each
        size = size + own
        stage = each.stage
    if bucket:
        yield bucket
