"""Gathering of slices by ranks that are threads here, and the bytes that each receives."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from asyncrl.engines.ranks import weight_gathering
from asyncrl.engines.ranks.pipeline import StageTensor
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.ranks.weight_gathering import OwnSlice, WeightGathering, gather_for_generation
from asyncrl.lanes.weights.plan.regrouping import Regrouping
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.protocols.rank_layout import Layout
from tests.unit.conftest import ThreadRank, thread_group
from tests.unit.protocols.resharding_cost import formula

LAYOUT = Layout(tp=4, dp=2, generation_tp=2)
WHOLE = {"q": (torch.randn(16, 6), 0), "o": (torch.randn(6, 16), 1), "bias": (torch.randn(16), 0)}
SECONDS = 20


Gathered: TypeAlias = tuple[dict[str, Tensor], WeightGathering, ThreadRank]


def gathered(dtype: torch.dtype) -> list[Gathered]:
    """Gathers at every rank of LAYOUT; returns what each made, and how."""

    def slices(rank: int) -> dict[str, OwnSlice]:
        return {name: OwnSlice(whole.chunk(4, dim)[rank % 4], dim) for name, (whole, dim) in WHOLE.items()}

    return run(Regrouping(LAYOUT), slices, dtype)


def connected(groups: list[list[int]]) -> dict[int, ThreadRank]:
    """Returns the end of each rank, by rank."""
    return {rank: own for members in groups for rank, own in zip(members, thread_group(len(members)), strict=True)}


def run(regrouping: Regrouping, slices: Callable[[int], dict[str, OwnSlice]], dtype: torch.dtype) -> list[Gathered]:
    groups = connected(regrouping.layout.groups("gathering"))

    def gather(rank: int) -> Gathered:
        gathering = WeightGathering(regrouping, rank, groups[rank])
        return gathering.gather(slices(rank), dtype), gathering, groups[rank]

    size = regrouping.layout.size
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(gather, range(size), timeout=SECONDS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_gathers_what_it_generates_with(dtype: torch.dtype) -> None:
    bytes_cut = sum(whole.numel() for whole, _ in WHOLE.values())
    for rank, (made, gathering, group) in enumerate(gathered(dtype)):
        for name, (whole, dim) in WHOLE.items():
            assert torch.equal(made[name], whole.to(dtype).chunk(2, dim)[LAYOUT.place(rank).tp // 2])
        assert gathering.received == formula("zero-redundancy", LAYOUT).volume * bytes_cut * dtype.itemsize
        assert group.exchanges == 1


def test_buckets_bound_the_memory_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gathered(torch.float32)
    monkeypatch.setattr(weight_gathering, "BUCKET_BYTES", 4 * 24 + 4)  # q or o of one rank, and not the bias too.
    for (made, gathering, group), (other, in_one, _) in zip(gathered(torch.float32), expected, strict=True):
        assert made.keys() == other.keys()
        assert all(torch.equal(made[name], other[name]) for name in made)
        assert (group.exchanges, gathering.received) == (3, in_one.received)


def test_slices_of_each_stage_come_from_its_ranks_alone() -> None:
    """A pipeline of two stages with a tensor each: every rank gathers both, and those that generate by stages one."""
    wholes = [("q", torch.randn(8, 6), 0), ("o", torch.randn(6, 12), 1)]
    _gathers_stages(wholes, 1, exchanges=4)
    _gathers_stages(wholes, 2, exchanges=1)


def _gathers_stages(wholes: list[tuple[str, Tensor, int]], generation_pp: int, exchanges: int) -> None:
    regrouping = Regrouping(Layout(pp=2, tp=2, generation_pp=generation_pp, generation_tp=1))

    def slices(rank: int) -> dict[str, OwnSlice]:
        at = Layout(pp=2, tp=2).place(rank)
        found = {}
        for stage, (name, whole, dim) in enumerate(wholes):
            part = whole.chunk(2, dim)[at.tp]
            if stage == at.pp or generation_pp == 1:
                found[name] = OwnSlice(part if stage == at.pp else part.to("meta"), dim, stage)
        return found

    for rank, (made, gathering, group) in enumerate(run(regrouping, slices, torch.float32)):
        names = [name for stage, _ in regrouping.needed(rank) for name in (wholes[stage][0],)]
        assert made.keys() == {*names}
        assert all(torch.equal(made[name], whole) for name, whole, _ in wholes if name in made)
        own = sum(part.nbytes for part, _, _ in slices(rank).values() if not part.is_meta)
        assert gathering.received == sum(each.nbytes for each in made.values()) - own
        assert group.exchanges == exchanges


# Stages gather the layers that they sample with, in groups of all sizes.


STAGES = 4
LAYERS = {f"layer{stage}": (stage,) for stage in range(STAGES)}
HELD = {"embedding": (0, STAGES - 1), **LAYERS, "norm": (STAGES - 1,)}
"""Stages that train each tensor; the embedding is the head too."""
TENSORS = {name: torch.full((8, 6), float(number)) for number, name in enumerate(HELD)}
SPEC = WeightsSpec.of({name: tuple(each.shape) for name, each in TENSORS.items()}, "float32")
LAYER_BYTES = TENSORS["norm"].nbytes


@pytest.mark.parametrize("generation_pp", [1, 2, 4])
def test_a_rank_gathers_the_stages_that_it_samples_with(generation_pp: int) -> None:
    layout = Layout(pp=STAGES, generation_pp=generation_pp)
    stages = connected([[*range(STAGES)]])
    gathering = connected(layout.groups("gathering"))

    def gathered(rank: int) -> Any:
        named: dict[str, Any] = {}
        for name, (owner, *others) in HELD.items():
            own = TENSORS[name].clone() if rank in (owner, *others) else TENSORS[name].to("meta")
            named[name] = StageTensor(own, owner, stages[rank], moves=False) if owner else own
        mesh = RankMesh(everyone=stages[rank], stages=stages[rank], gathering=gathering[rank])
        return gather_for_generation(named, SPEC, Regrouping(layout), mesh)

    with ThreadPoolExecutor(STAGES) as pool:
        found = list(pool.map(gathered, range(STAGES), timeout=SECONDS))
    for rank, (made, received) in enumerate(found):
        each = STAGES // generation_pp
        own = range(rank // each * each, (rank // each + 1) * each)
        assert made.keys() == {name for name, held in HELD.items() if {*held} & {*own}}
        assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in made.items())
        volume = formula("zero-redundancy", layout).volume * len(LAYERS) * LAYER_BYTES
        others = sum(LAYER_BYTES for name in made if name not in LAYERS and not {rank} & {*HELD[name]})
        if generation_pp == 1 and rank == STAGES - 1:
            others += LAYER_BYTES  # The first stage gives the embedding to all.
        assert received == volume + others
