"""Gathering of slices by ranks that are threads here; tests/unit/bench/transfer_speed/test_weight_regrouping.py has
processes, and counts their bytes."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import get_args

import pytest
import torch
from torch import Tensor

from asyncrl.engines.training.ranks import weight_gathering
from asyncrl.engines.training.ranks.rank_group import Ranks
from asyncrl.engines.training.ranks.weight_gathering import OwnSlice, WeightGathering
from asyncrl.lanes.weights.plan.regrouping import Grouping, Regrouping
from asyncrl.protocols.rank_layout import Layout

LAYOUT = Layout(tp=4, dp=2, generation_tp=2)
WHOLE = {"q": (torch.randn(16, 6), 0), "o": (torch.randn(6, 16), 1), "bias": (torch.randn(16), 0)}
SECONDS = 20


class ThreadRanks(Ranks):
    """A rank of a group of threads. boxes: one of each rank."""

    def __init__(self, rank: int, boxes: list[Tensor | None], barrier: Barrier) -> None:
        self.rank = rank
        self.size = len(boxes)
        self.exchanges = 0
        self._boxes = boxes
        self._barrier = barrier

    def gather_equal(self, values: Tensor) -> list[Tensor]:
        self.exchanges += 1
        self._boxes[self.rank] = values
        self._barrier.wait(SECONDS)
        found = [box.clone() for box in self._boxes if box is not None]
        self._barrier.wait(SECONDS)
        return found


def gathered(grouping: Grouping, dtype: torch.dtype) -> list[tuple[dict[str, Tensor], WeightGathering, ThreadRanks]]:
    """Gathers at every rank of LAYOUT; returns what each made, and how."""
    regrouping = Regrouping(LAYOUT, grouping)
    groups: dict[int, ThreadRanks] = {}
    for members in regrouping.gathering():
        boxes: list[Tensor | None] = [None] * len(members)
        barrier = Barrier(len(members))
        groups |= {rank: ThreadRanks(place, boxes, barrier) for place, rank in enumerate(members)}

    def run(rank: int) -> tuple[dict[str, Tensor], WeightGathering, ThreadRanks]:
        slices = {name: OwnSlice(whole.chunk(4, dim)[rank % 4], dim) for name, (whole, dim) in WHOLE.items()}
        gathering = WeightGathering(regrouping, rank, groups[rank])
        return gathering.gather(slices, dtype), gathering, groups[rank]

    with ThreadPoolExecutor(LAYOUT.size) as pool:
        return list(pool.map(run, range(LAYOUT.size), timeout=SECONDS))


@pytest.mark.parametrize("grouping", get_args(Grouping))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_gathers_what_it_generates_with(grouping: Grouping, dtype: torch.dtype) -> None:
    regrouping, bytes_cut = Regrouping(LAYOUT, grouping), sum(whole.numel() for whole, _ in WHOLE.values())
    for rank, (made, gathering, group) in enumerate(gathered(grouping, dtype)):
        for name, (whole, dim) in WHOLE.items():
            assert torch.equal(made[name], whole.to(dtype).chunk(2, dim)[regrouping.place(rank).tp])
        assert gathering.received == regrouping.cost(rank).volume * bytes_cut * dtype.itemsize
        assert group.exchanges == 1


def test_buckets_bound_the_memory_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gathered("zero-redundancy", torch.float32)
    monkeypatch.setattr(weight_gathering, "BUCKET_BYTES", 4 * 24 + 4)  # q or o of one rank, and not the bias too.
    for (made, gathering, group), (other, in_one, _) in zip(
        gathered("zero-redundancy", torch.float32), expected, strict=True
    ):
        assert made.keys() == other.keys()
        assert all(torch.equal(made[name], other[name]) for name in made)
        assert (group.exchanges, gathering.received) == (3, in_one.received)


def test_stages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^weights of pipeline stages are not gathered: use pp = 1$"):
        WeightGathering(Regrouping(Layout(pp=2, tp=2)), 0, Ranks())
