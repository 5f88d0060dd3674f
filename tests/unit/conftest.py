"""Ranks of a trainer in one process; files that can only be read."""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from asyncrl.engines.ranks.rank_mesh import RankMesh, Ranks
from asyncrl.protocols.rank_layout import Axis, Layout

PATIENCE = 30.0


class ThreadRank(Ranks):
    """One of several ranks that are threads of this process. given: what each has put in, shared by all."""

    def __init__(self, rank: int, given: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(given)
        self.exchanges = 0
        self._given = given
        self._barrier = barrier

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(values)).sum(0)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(values)).amax(0)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(rows))

    def gather_equal(self, values: torch.Tensor) -> list[torch.Tensor]:
        return self._exchange(values)

    def shared(self, values: torch.Tensor, source: int) -> torch.Tensor:
        return self._exchange(values)[source]

    def to_each(self, parts: torch.Tensor) -> torch.Tensor:
        return torch.stack([given[self.rank] for given in self._exchange(parts)])

    def _exchange(self, values: torch.Tensor) -> list[torch.Tensor]:
        self.exchanges += 1
        self._given[self.rank] = values.clone()
        self._barrier.wait()
        everything = list(self._given)
        self._barrier.wait()
        return everything


@pytest.fixture
def thread_ranks() -> Callable[[int], list[RankMesh]]:
    """thread_ranks(size) -> the data ranks, each to be used by a thread of its own."""
    return lambda size: [RankMesh.of_data(ranks) for ranks in thread_group(size)]


@pytest.fixture
def thread_meshes() -> Callable[[Layout], list[RankMesh]]:
    """thread_meshes(layout) -> the ranks of a layout that hold whole weights, each to be used by its own thread."""

    def make(layout: Layout) -> list[RankMesh]:
        axes: list[Axis] = ["everyone", "rows", "copies", "sequence"]
        groups: list[dict[str, Ranks]] = [{} for _ in range(layout.size)]
        for axis in axes:
            for numbers in layout.groups(axis):
                for number, ranks in zip(numbers, thread_group(len(numbers)), strict=True):
                    groups[number][axis] = ranks
        return [RankMesh(**each) for each in groups]

    return make


def thread_group(size: int) -> list[ThreadRank]:
    given = [torch.empty(0)] * size
    barrier = threading.Barrier(size, timeout=PATIENCE)
    return [ThreadRank(rank, given, barrier) for rank in range(size)]


NOBODY = 65534


@pytest.fixture
def readable_folder() -> Iterator[Path]:
    """Unlike tmp_path one that other users, too, find their way to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def only_reading() -> Callable[..., AbstractContextManager[None]]:
    """only_reading(folder, *names): inside, these in it are not ours to write; without names nothing is."""

    @contextmanager
    def reading(folder: Path, *names: str) -> Iterator[None]:
        everything = [folder, *folder.rglob("*")]
        for path in everything:
            path.chmod(0o777 if path.is_dir() else 0o666)
        kept = [folder / name for name in names] or everything
        for path in kept:
            path.chmod(path.stat().st_mode & ~0o222)
        ours = os.geteuid()
        if ours == 0:
            os.seteuid(NOBODY)  # Root may write everything.
        try:
            yield
        finally:
            os.seteuid(ours)
            for path in kept:
                path.chmod(path.stat().st_mode | 0o200)

    return reading
