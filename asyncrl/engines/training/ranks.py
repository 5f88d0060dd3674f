"""The trainer's data-parallel ranks: sums over all of them, with one rank or several."""

from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Ranks(Protocol):
    """Every rank calls the same methods in the same order; each blocks the compute thread until all have."""

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks; may be done in place."""
        ...

    def largest(self, values: Tensor) -> Tensor:
        """Element-wise maximum over ranks; may be done in place."""
        ...


class Alone:
    """One rank."""

    def sum(self, values: Tensor) -> Tensor:
        return values

    def largest(self, values: Tensor) -> Tensor:
        return values


class Gloo:
    """Several processes over torch.distributed, CPU tensors.

    meeting: a file that does not exist yet, the same for all ranks. A rank that is not there within `deadline`
    seconds makes every call of the others raise.
    """

    def __init__(self, meeting: Path, rank: int, size: int, deadline: float) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=deadline)
        )

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.SUM)
        return values

    def largest(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def close(self) -> None:
        dist.destroy_process_group()


def sum_gradients(ranks: Ranks, parameters: list[nn.Parameter]) -> None:
    """Every rank holds the gradient of its own rows, already divided by the denominators of the whole step."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad = ranks.sum(parameter.grad)
