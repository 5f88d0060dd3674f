"""The data-parallel ranks of a trainer and their exchanges: one rank alone, or processes over torch.distributed."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncrl.engines.training.ranks.rank_store import open_store
from asyncrl.errors import PeerLost, WeightsError
from asyncrl.fleet.worker.rank_meeting import MeetingPlace

Waiting = Callable[[], AbstractContextManager[None]]
BUCKET = 8 << 20
"""Gradient values per all-reduce. Single tensors would cost a round trip each; all tensors at once would need a second
copy of the gradient."""


class Ranks:
    """Exchanges tensors between ranks, which call the same methods in the same order; each call blocks the compute
    thread until all ranks made it. This class is one rank alone, which has nothing to exchange."""

    rank = 0
    size = 1

    def sum(self, values: Tensor) -> Tensor:
        """Sums element-wise over ranks, with the same bits on each; may work in place."""
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Returns the element-wise maximum over ranks; may work in place."""
        return values

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenates the tensors [rows, width] of all ranks in rank order; numbers of rows may differ."""
        return rows


class DistributedRanks(Ranks):
    """Runs one rank per process over torch.distributed: NCCL where each rank has its own GPU, as NCCL requires, else
    gloo, which copies to the host.

    meeting: the TCP store through which the ranks find each other. start: seconds until all ranks must have joined.
    exchange: seconds that one exchange may take, waiting for the slowest rank included. waiting: books the time of
    every exchange. has_own_gpu: `device` is a GPU that no other rank has. Every method raises PeerLost when another
    rank is gone or late; no exchange works after it.
    """

    def __init__(
        self,
        meeting: MeetingPlace,
        rank: int,
        size: int,
        device: str,
        waiting: Waiting,
        start: float,
        exchange: float,
        has_own_gpu: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self._waiting = waiting
        self._timeout = exchange
        backend = backend_of(device, size, torch.cuda.device_count(), has_own_gpu=has_own_gpu)
        self._device = torch.device(own_device(device, rank, size) if backend == "nccl" else "cpu")
        if backend == "nccl":
            torch.cuda.set_device(self._device)
        with self._exchange(f"did not all join within {start:g} s"):
            store = open_store(meeting, start)
            store.set(f"joined/{rank}", "1")  # gloo would wait for a missing rank as long as for an exchange.
            store.wait([f"joined/{other}" for other in range(size)], timedelta(seconds=start))
            timeout = timedelta(seconds=exchange)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)

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
            why = failed or f"could not exchange within {self._timeout:g} s, or one of them is gone"
            raise PeerLost(f"the {self.size} training ranks {why} (seen by rank {self.rank}: {error})") from error


def backend_of(device: str, size: int, gpus: int, *, has_own_gpu: bool) -> str:
    """Returns the backend of torch.distributed: NCCL where each rank has a GPU that no other rank has. gpus: those of
    this host. has_own_gpu: `device` is one of a pool."""
    return "nccl" if has_own_gpu or (device == "cuda" and gpus >= size) else "gloo"


def own_device(device: str, rank: int, size: int) -> str:
    """Returns the GPU of this rank where `device` is "cuda"; ranks share GPUs when there are too few."""
    return device if device != "cuda" or size == 1 else f"cuda:{rank % torch.cuda.device_count()}"


def sum_gradients(ranks: Ranks, parameters: list[nn.Parameter]) -> None:
    """Sums gradients over ranks. Each rank has already divided by the denominators of the whole optimizer step."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if ranks.size == 1:
        return
    for bucket in _buckets(parameters):
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        summed = ranks.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = torch.split(summed, [parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Groups parameters in order into buckets of at most BUCKET values, or of one larger tensor."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(each.numel() for each in bucket) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket


def check_same(ranks: Ranks, tensors: Iterable[Tensor]) -> None:
    """Raises WeightsError on every rank unless all ranks hold the same bits, and so sum gradients of one model."""
    if ranks.size == 1:
        return
    digest = 0
    for tensor in tensors:
        digest = zlib.crc32(tensor.detach().cpu().contiguous().numpy().data.cast("B"), digest)
    highest, lowest = ranks.largest(torch.tensor([digest, -digest])).tolist()
    if highest != -lowest:
        raise WeightsError(
            f"the {ranks.size} training ranks no longer hold the same weights (rank {ranks.rank}: {digest:08x}); "
            "resume from an earlier checkpoint"
        )
