"""Gathers the weights that a rank generates with from ranks that train other slices of the same layers.

    rank 0    q[0:8]   o[:, 0:8] ──┐              ┌── q[0:16]  o[:, 0:16]
    rank 1    q[8:16]  o[:, 8:16] ─┴─ all-gather ─┴── the same

One all-gather in each group of `Regrouping.gathering`, in buckets, so that memory holds what is generated with and one
bucket, but no second copy of it. What ranks hold whole is not gathered. Pipeline stages are not gathered here.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.engines.training.ranks.rank_group import Ranks
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.ranks.shards import cut_dim, is_split, own_part
from asyncrl.lanes.weights.plan.regrouping import Regrouping
from asyncrl.lanes.weights.tensor_spec import DTYPES, WeightsSpec
from asyncrl.protocols.rank_layout import Layout

BUCKET_BYTES = 32 << 20
"""Bytes of one rank in a bucket: an exchange takes far longer than its start, and eight ranks fill 256 MB."""


class OwnSlice(NamedTuple):
    """A rank's slice of a tensor that is cut along `dim`."""

    part: Tensor
    dim: int


class WeightGathering:
    """Gathers for one rank. group: the ranks that it gathers from, itself among them. received: bytes that came from
    other ranks."""

    def __init__(self, regrouping: Regrouping, rank: int, group: Ranks) -> None:
        if regrouping.layout.pp > 1:
            raise ValueError("weights of pipeline stages are not gathered: use pp = 1")
        members = next(ranks for ranks in regrouping.gathering() if rank in ranks)
        assert group.size == len(members), f"{group.size} ranks connected where {len(members)} gather"
        slices = [regrouping.layout.place(member).tp for member in members]
        self._sources = [slices.index(number) for _, number in sorted(regrouping.needed(rank))]
        self._group = group
        self.received = 0

    def gather(self, slices: Mapping[str, OwnSlice], dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns what this rank generates with, in this dtype. All ranks of the group call it with the slices of the
        same tensors in the same order. Raises PeerLost when one of them is gone."""
        made: dict[str, Tensor] = {}
        for bucket in _buckets(slices, dtype.itemsize):
            flat = torch.cat([each.part.detach().to(dtype).flatten() for each in bucket.values()])
            gathered = [each.view(dtype) for each in self._group.gather_equal(flat.view(torch.uint8))]
            self.received += (self._group.size - 1) * flat.numel() * dtype.itemsize
            start = 0
            for name, (part, dim) in bucket.items():
                stop = start + part.numel()
                pieces = [gathered[source][start:stop].view(part.shape) for source in self._sources]
                made[name] = torch.cat(pieces, dim)
                start = stop
        return made


def gather_for_generation(
    tensors: Mapping[str, Tensor], spec: WeightsSpec, layout: Layout, mesh: RankMesh
) -> tuple[dict[str, Tensor], int]:
    """Returns the tensors of a specification in its dtype, and the bytes received for them. What this rank holds whole
    is no copy where it has that dtype. Raises PeerLost when another rank is gone."""
    dtype = DTYPES[spec.dtype]
    own = {each.name: tensors[each.name] for each in spec.tensors}
    cut = {name: OwnSlice(own_part(each), cut_dim(each)) for name, each in own.items() if is_split(each)}
    if not cut:
        return {name: each.detach().to(dtype) for name, each in own.items()}, 0
    gathering = WeightGathering(Regrouping(layout), mesh.rank, mesh.gathering)
    gathered = gathering.gather(cut, dtype)
    made = {name: gathered[name] if name in cut else own_part(each).detach().to(dtype) for name, each in own.items()}
    return made, gathering.received


def _buckets(slices: Mapping[str, OwnSlice], item_bytes: int) -> Iterator[dict[str, OwnSlice]]:
    """Groups slices in order into buckets of at most BUCKET_BYTES, or of one larger slice."""
    bucket: dict[str, OwnSlice] = {}
    size = 0
    for name, each in slices.items():
        own = each.part.numel() * item_bytes
        if bucket and size + own > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name], size = each, size + own
    if bucket:
        yield bucket
