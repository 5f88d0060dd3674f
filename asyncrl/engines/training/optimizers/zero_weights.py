"""Weights that ranks share out in flat parts, as DeepSpeed does in stage 3.

a tensor of 10 numbers on 4 ranks   [0 1 2] [3 4 5] [6 7 8] [9 . .]   the last parts may have less, or nothing
"""

from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.engines.training.ranks.rank_group import Ranks
from asyncrl.engines.training.ranks.stage_weights import ElsewhereTensor


class FlatTensor(ElsewhereTensor):
    """Stands for a weight of which this rank holds a flat part; all ranks gather it."""

    def __init__(self, own: Tensor, shape: torch.Size, ranks: Ranks) -> None:
        super().__init__(own, shape)
        self._ranks = ranks

    @classmethod
    def of(cls, parameter: Any, ranks: Ranks) -> "FlatTensor":
        return cls(parameter.ds_tensor.detach(), parameter.ds_shape, ranks)

    def to(self, dtype: torch.dtype) -> "FlatTensor":
        return FlatTensor(self.own.to(dtype), self.shape, self._ranks)

    def full_tensor(self) -> Tensor:
        gathered = torch.cat(self._ranks.gather_equal(self.own))
        return gathered[: self.shape.numel()].view(self.shape)


def is_flat_part(tensor: Tensor | nn.Parameter) -> bool:
    """Returns whether DeepSpeed shares out a weight."""
    return hasattr(tensor, "ds_tensor")


def own_flat_part(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns the part of a rank, which zeros fill up to the length of the others."""
    size = -(-whole.numel() // ranks)
    part = whole.flatten()[rank * size : (rank + 1) * size]
    return torch.cat([part, part.new_zeros(size - len(part))])
