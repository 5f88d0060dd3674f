"""Ranks of a trainer in one process."""

import threading
from collections.abc import Callable

import pytest
import torch

from asyncrl.engines.training.ranks import Ranks

PATIENCE = 30.0


class ThreadRank:
    """One of several ranks that are threads of this process. given: what each has put in, shared by all."""

    def __init__(self, rank: int, given: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(given)
        self._given, self._barrier = given, barrier

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(values)).sum(0)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(values)).amax(0)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(rows))

    def _exchange(self, values: torch.Tensor) -> list[torch.Tensor]:
        self._given[self.rank] = values.clone()
        self._barrier.wait()
        everything = list(self._given)
        self._barrier.wait()
        return everything


@pytest.fixture
def thread_ranks() -> Callable[[int], list[Ranks]]:
    """thread_ranks(size) -> the ranks, each to be used by a thread of its own."""

    def make(size: int) -> list[Ranks]:
        given, barrier = [torch.empty(0)] * size, threading.Barrier(size, timeout=PATIENCE)
        return [ThreadRank(rank, given, barrier) for rank in range(size)]

    return make
