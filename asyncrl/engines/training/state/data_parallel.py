"""The trainer's data-parallel ranks: what they exchange, with one rank or several."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncrl.errors import PeerLost, WeightsError

Waiting = Callable[[], AbstractContextManager[None]]

BUCKET = 8 << 20
"""Values that are summed at a time: a few tensors cost a round trip each, all at once a second copy of the gradient."""


class Ranks(Protocol):
    """Every rank calls the same methods in the same order; each blocks the compute thread until all have."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks, the same bits on each; may be done in place."""
        ...

    def largest(self, values: Tensor) -> Tensor:
        """Element-wise maximum over ranks; may be done in place."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """[rows, width] of every rank, one rank's after the other's; their numbers of rows may differ."""
        ...


class Alone:
    """One rank."""

    rank, size = 0, 1

    def sum(self, values: Tensor) -> Tensor:
        return values

    def largest(self, values: Tensor) -> Tensor:
        return values

    def gather(self, rows: Tensor) -> Tensor:
        return rows


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks that are processes find each other.

    file: does not exist yet, the same for all. start: seconds until all must be there. exchange: seconds that one
    exchange may take, the wait for the slowest rank included.
    """

    file: Path
    start: float
    exchange: float


class Processes:
    """Ranks of one process each, over torch.distributed: NCCL where each has a GPU of its own, else gloo.

    waiting: what surrounds every exchange, which is mostly waiting for others. Raises PeerLost, from the constructor
    and every method, when another rank is gone or too late; no exchange works after that.
    """

    def __init__(self, meeting: Meeting, rank: int, size: int, device: str, waiting: Waiting) -> None:
        self.rank, self.size = rank, size
        self._waiting, self._patience = waiting, meeting.exchange
        backend = backend_for(device, size)
        self._device = torch.device(own_device(device, rank, size) if backend == "nccl" else "cpu")
        if backend == "nccl":
            torch.cuda.set_device(self._device)
        with self._exchange(f"did not all meet within {meeting.start:g} s"):
            store = dist.FileStore(str(meeting.file), size)  # type: ignore[attr-defined]
            store.set_timeout(timedelta(seconds=meeting.start))
            patience = timedelta(seconds=meeting.exchange)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)

    def sum(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, rows: Tensor) -> Tensor:
        counts = [int(count) for count in self._gather_equal(torch.tensor([len(rows)]))]
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = self._gather_equal(padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        moved = values.to(self._device)
        with self._exchange():
            dist.all_reduce(moved, operation)
        return moved.to(values.device)

    def _gather_equal(self, values: Tensor) -> list[Tensor]:
        moved = values.to(self._device)
        parts = [torch.empty_like(moved) for _ in range(self.size)]
        with self._exchange():
            dist.all_gather(parts, moved)
        return [part.to(values.device) for part in parts]

    @contextmanager
    def _exchange(self, failed: str = "") -> Iterator[None]:
        try:
            with self._waiting():
                yield
        except RuntimeError as error:
            why = failed or f"could not exchange within {self._patience:g} s, or one of them is gone"
            raise PeerLost(f"the {self.size} training ranks {why} (seen by rank {self.rank}: {error})") from error


def own_device(device: str, rank: int, size: int) -> str:
    """The rank's own GPU where `device` names none in particular; GPUs are shared when there are too few."""
    if device != "cuda" or size == 1:
        return device
    return f"cuda:{rank % torch.cuda.device_count()}"


def backend_for(device: str, size: int) -> str:
    """NCCL refuses two ranks on one GPU; gloo takes what lies on a GPU over the host's memory."""
    return "nccl" if device == "cuda" and torch.cuda.device_count() >= size else "gloo"


def sum_gradients(ranks: Ranks, parameters: list[nn.Parameter]) -> None:
    """Every rank holds the gradient of its own rows, already divided by the denominators of the whole step."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if ranks.size == 1:
        return
    for some in _buckets(parameters):
        summed = ranks.sum(torch.cat([_gradient(parameter).flatten() for parameter in some]))
        parts = torch.split(summed, [parameter.numel() for parameter in some])
        for parameter, part in zip(some, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """In order, BUCKET values or fewer in each, but at least one tensor."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(each.numel() for each in bucket) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket


def check_same(ranks: Ranks, tensors: Iterable[Tensor]) -> None:
    """Raise WeightsError, on every rank, unless all ranks hold the same bits: after the first difference the gradients
    that they sum are of different models."""
    if ranks.size == 1:
        return
    digest = 0
    for tensor in tensors:
        digest = zlib.crc32(tensor.detach().cpu().contiguous().numpy().data.cast("B"), digest)
    highest, lowest = ranks.largest(torch.tensor([digest, -digest])).tolist()
    if highest != -lowest:
        raise WeightsError(
            f"the {ranks.size} training ranks no longer hold the same weights (rank {ranks.rank}: {digest:08x}); "
            "go on from an earlier checkpoint"
        )
