"""Exchanges along one axis of a trainer's ranks: one rank alone, or processes over torch.distributed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.lanes.control.message_codec import decode, encode

Exchange = Callable[[], AbstractContextManager[None]]
"""Opens the scope of one exchange, which books its time, and raises PeerLost for what torch raises in it."""


class Ranks:
    """Exchanges tensors between the ranks of a group, which call the same methods in the same order; each call blocks
    the compute thread until all ranks made it. This class is one rank alone, which has nothing to exchange.

    rank, size: number of this rank in its group, and number of ranks in it.
    """

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

    def gather_equal(self, values: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks in rank order; all have the same shape."""
        return [values]

    def to_each(self, parts: Tensor) -> Tensor:
        """Gives part i of the tensor [ranks, ...] to rank i; returns what each rank gave to this one, in rank order."""
        return parts

    def to_each_uneven(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Gives consecutive rows of [rows, width] to the ranks, sent[i] to rank i; returns those that each rank gave to
        this one, received[i] of rank i, in rank order."""
        return rows

    def shared(self, values: Tensor, source: int) -> Tensor:
        """Returns the values of rank `source` on all ranks, which give tensors like it."""
        return values

    def told(self, value: Any, source: int) -> Any:
        """Returns on all ranks the value of rank `source`, a message or plain values."""
        return self.told_by_each(value if self.rank == source else None)[source]

    def told_by_each(self, value: Any) -> list[Any]:
        """Returns on all ranks the values of each, messages, arrays or plain values, in rank order."""
        frames = [bytes(frame) for frame in encode(value)]
        counts = [int(count) for count in self.gather(torch.tensor([[len(frames)]])).flatten()]
        sizes = self.gather(torch.tensor([len(frame) for frame in frames]).reshape(-1, 1)).flatten().tolist()
        letters = torch.frombuffer(bytearray().join(frames), dtype=torch.uint8)
        stream = self.gather(letters.reshape(-1, 1)).flatten().numpy().tobytes()
        ends = list(accumulate(sizes, initial=0))
        parts = [stream[start:end] for start, end in pairwise(ends)]
        firsts = list(accumulate(counts, initial=0))
        return [decode(parts[first:end]) for first, end in pairwise(firsts)]

    def moved(self, values: Tensor, source: int, target: int = 0) -> Tensor:
        """Returns at rank `target` the values of rank `source`; it gives a tensor like them. Others need not call."""
        return values


class FormerRanks(Ranks):
    """Remembers the place of a rank in a group that it has left: it exchanges nothing any more."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


class DistributedRanks(Ranks):
    """Exchanges over a process group of torch.distributed, on its device. Every method raises PeerLost when another
    rank is gone or late; no exchange works after it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, exchange: Exchange) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group = group
        self._device = device
        self._exchange = exchange

    def sum(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, rows: Tensor) -> Tensor:
        counts = [int(count) for count in self.gather_equal(torch.tensor([len(rows)]))]
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = self.gather_equal(padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def to_each(self, parts: Tensor) -> Tensor:
        moved = parts.to(self._device).contiguous()
        found = torch.empty_like(moved)
        with self._exchange():  # As bytes, because gloo does not send every dtype.
            dist.all_to_all_single(found.view(torch.uint8), moved.view(torch.uint8), group=self._group)
        return found.to(parts.device)

    def to_each_uneven(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        moved = rows.to(self._device).contiguous()
        found = moved.new_empty((sum(received), *rows.shape[1:]))
        with self._exchange():  # As bytes, as above.
            parts = (found.view(torch.uint8), moved.view(torch.uint8))
            dist.all_to_all_single(*parts, received, sent, group=self._group)
        return found.to(rows.device)

    def moved(self, values: Tensor, source: int, target: int = 0) -> Tensor:
        if source == target or self.rank not in (target, source):
            return values
        flat = values.detach().to(self._device).contiguous().reshape(-1)
        with self._exchange():
            if self.rank == source:
                dist.send(flat, dist.get_global_rank(self._group, target), self._group)
            else:
                dist.recv(flat, dist.get_global_rank(self._group, source), self._group)
        return flat.reshape(values.shape).to(values.device)

    def shared(self, values: Tensor, source: int) -> Tensor:
        moved = values.detach().to(self._device, copy=self.rank != source).contiguous()
        with self._exchange():  # As bytes, because gloo does not send every dtype.
            dist.broadcast(moved.reshape(-1).view(torch.uint8), dist.get_global_rank(self._group, source), self._group)
        return moved.to(values.device)

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        moved = values.to(self._device)
        with self._exchange():
            dist.all_reduce(moved, operation, self._group)
        return moved.to(values.device)

    def gather_equal(self, values: Tensor) -> list[Tensor]:
        moved = values.to(self._device)
        parts = [torch.empty_like(moved) for _ in range(self.size)]
        with self._exchange():
            dist.all_gather(parts, moved, self._group)
        return [part.to(values.device) for part in parts]
