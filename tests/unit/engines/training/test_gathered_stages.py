"""Stages gather the layers that they sample with, in groups of all sizes. Ranks are threads."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from asyncrl.engines.ranks.pipeline import StageTensor
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.ranks.weight_gathering import gather_for_generation
from asyncrl.lanes.weights.plan.regrouping import Regrouping
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.training.test_weight_gathering import SECONDS, ThreadRanks

STAGES = 4
LAYERS = {f"layer{stage}": (stage,) for stage in range(STAGES)}
HELD = {"embedding": (0, STAGES - 1), **LAYERS, "norm": (STAGES - 1,)}
"""Stages that train each tensor; the embedding is the head too."""
WHOLE = {name: torch.full((8, 6), float(number)) for number, name in enumerate(HELD)}
SPEC = WeightsSpec.of({name: tuple(each.shape) for name, each in WHOLE.items()}, "float32")
LAYER_BYTES = WHOLE["norm"].nbytes


class TellingRanks(ThreadRanks):
    """Threads that tell values too."""

    def told(self, value: Any, source: int) -> Any:
        self._boxes[self.rank] = value
        self._barrier.wait(SECONDS)
        found = self._boxes[source]
        self._barrier.wait(SECONDS)
        return found


def connected(groups: list[list[int]]) -> dict[int, TellingRanks]:
    found: dict[int, TellingRanks] = {}
    for members in groups:
        boxes: list[Any] = [None] * len(members)
        barrier = Barrier(len(members))
        found |= {rank: TellingRanks(place, boxes, barrier) for place, rank in enumerate(members)}
    return found


@pytest.mark.parametrize("generation_pp", [1, 2, 4])
def test_a_rank_gathers_the_stages_that_it_samples_with(generation_pp: int) -> None:
    layout = Layout(pp=STAGES, generation_pp=generation_pp)
    stages = connected([[*range(STAGES)]])
    gathering = connected(layout.groups("gathering"))

    def gathered(rank: int) -> Any:
        named: dict[str, Any] = {}
        for name, (owner, *others) in HELD.items():
            own = WHOLE[name].clone() if rank in (owner, *others) else WHOLE[name].to("meta")
            named[name] = StageTensor(own, owner, stages[rank], moves=False) if owner else own
        mesh = RankMesh(everyone=stages[rank], stages=stages[rank], gathering=gathering[rank])
        return gather_for_generation(named, SPEC, Regrouping(layout), mesh)

    with ThreadPoolExecutor(STAGES) as pool:
        found = list(pool.map(gathered, range(STAGES), timeout=SECONDS))
    for rank, (made, received) in enumerate(found):
        each = STAGES // generation_pp
        own = range(rank // each * each, (rank // each + 1) * each)
        assert made.keys() == {name for name, held in HELD.items() if {*held} & {*own}}
        assert all(torch.equal(tensor, WHOLE[name]) for name, tensor in made.items())
        volume = Regrouping(layout).cost(rank).volume * len(LAYERS) * LAYER_BYTES
        others = sum(LAYER_BYTES for name in made if name not in LAYERS and not {rank} & {*HELD[name]})
        if generation_pp == 1 and rank == STAGES - 1:
            others += LAYER_BYTES  # The first stage gives the embedding to all.
        assert received == volume + others
