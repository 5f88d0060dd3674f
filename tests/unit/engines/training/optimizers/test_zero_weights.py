"""Weights in flat parts: the parts of all ranks give the whole again, cast before they are gathered."""

import pytest
import torch
from torch import Tensor

from asyncrl.engines.ranks.rank_mesh import Ranks
from asyncrl.engines.training.zero_optimizer import FlatTensor, own_flat_part
from asyncrl.lanes.weights.slot_memory import whole_tensor


class RanksWithParts(Ranks):
    """Ranks that hold the flat parts of one tensor."""

    def __init__(self, whole: Tensor, size: int) -> None:
        self.size = size
        self._parts = [own_flat_part(whole, rank, size) for rank in range(size)]

    def gather_equal(self, values: Tensor) -> list[Tensor]:
        return [part.to(values.dtype) for part in self._parts]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(5, 2), (7,), (1,)])
def test_flat_parts_give_the_whole_tensor(shape: tuple[int, ...], ranks: int) -> None:
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    parts = [own_flat_part(whole, rank, ranks) for rank in range(ranks)]
    assert {len(part) for part in parts} == {-(-whole.numel() // ranks)}
    found = whole_tensor(FlatTensor(parts[0], whole.shape, RanksWithParts(whole, ranks)), torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, whole.bfloat16())
