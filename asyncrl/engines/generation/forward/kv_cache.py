"""The memory of the paged KV cache: keys and values of all layers in blocks of positions, in the model's precision.

Which sequence owns which block is decided by `scheduling/block_pool.py`. All memory is reserved at the first write
and never moved or doubled. On CPUs the system provides a page when a block is first written, so the cache takes what
the blocks in `BlockPool.touched` need.
"""

import mmap
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.experts.record_shape import RecordShape
from asyncrl.engines.generation.scheduling.block_pool import KV_BLOCK, BlockTables, Ints, blocks_for


class KVCache:
    """Holds per layer keys [blocks, kv heads, head size, KV_BLOCK], values [blocks, kv heads, KV_BLOCK, head size], and
    the tables of who owns the blocks. Decode attention multiplies by keys in this order in half the time.

    Memory is zero at first, because attention multiplies masked positions by 0, and 0 times an uninitialised NaN is
    NaN.

    Args:
        limit: positions of the longest sequence.
        blocks: of all sequences together; None has room for the longest one in every slot.
        fixed: every slot owns blocks for `limit` positions from the start, so that shapes never change.
        record: of the experts of each position, which share, move and free with its block; None keeps none.
    """

    def __init__(
        self,
        slots: int,
        limit: int,
        *,
        blocks: int | None = None,
        fixed: bool = False,
        record: RecordShape | None = None,
    ) -> None:
        self.limit = limit
        self.record = record
        self._experts: list[Tensor] = []  # At most one, [blocks, KV_BLOCK, numbers of a token].
        most = blocks_for(limit)
        self.tables = BlockTables(slots, most, slots * most if blocks is None else blocks, fixed=fixed)
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._by_location: list[tuple[Tensor, Tensor]] = []  # views [blocks, KV_BLOCK, kv heads, head size]

    @property
    def used(self) -> float:
        """Returns the share of the blocks that are in use."""
        return 1.0 - self.tables.pool.room / len(self.tables.pool)

    @property
    def bytes(self) -> int:
        """Returns the bytes of all blocks that were ever used."""
        each = sum(tensor[0].nbytes for tensor in self._all()) if self._layers else 0
        return self.tables.pool.touched * each

    def free_memory(self) -> None:
        """Frees all memory until the next write, and forgets what was written."""
        self._layers.clear()
        self._experts.clear()
        self._by_location.clear()

    def locations(self, slots: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """Returns block and offset of these positions."""
        return self.tables.owned[slots, positions // KV_BLOCK], positions % KV_BLOCK

    def copy_block(self, source: int, slots: list[int], index: int) -> None:
        """Copies a block to the block `index` of these slots."""
        self._copy(np.full(len(slots), source), self.tables.owned[slots, index])

    def copy(self, source: int, slots: list[int], length: int) -> None:
        """Copies the first `length` positions of one slot to other slots."""
        count = blocks_for(length)
        for slot in slots:
            self.tables.allocate(slot, length)
        self._copy(np.tile(self.tables.owned[source, :count], len(slots)), self.tables.owned[slots, :count].ravel())

    def compact(self, slots: Ints) -> int:
        """Moves blocks of these slots to the front if they are scattered; returns how many leading blocks have them."""
        count, holes, strays = self.tables.compact(slots)
        if len(holes):
            self._copy(np.concatenate([strays, holes]), np.concatenate([holes, strays]))
        return count

    def write(
        self, layer: int, locations: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stores keys and values [tokens, kv heads, head size] at these blocks and offsets, int64 [tokens] each.

        Returns the keys and values of the whole layer.
        """
        if layer == len(self._layers):
            blocks_and_heads = (len(self.tables.pool), keys.shape[1])
            size = keys.shape[2]
            shapes = (*blocks_and_heads, size, KV_BLOCK), (*blocks_and_heads, KV_BLOCK, size)
            cached_keys = _reserve(shapes[0], keys)
            cached_values = _reserve(shapes[1], values)
            self._layers.append((cached_keys, cached_values))
            self._by_location.append((cached_keys.permute(0, 3, 1, 2), cached_values.transpose(1, 2)))
        for by_location, new in zip(self._by_location[layer], (keys, values), strict=True):
            by_location.index_put_(locations, new)
        return self._layers[layer]

    def remember(self, locations: tuple[Tensor, Tensor], experts: Tensor) -> None:
        """Stores the experts [tokens, numbers of a token] of what stands at these blocks and offsets."""
        if not self._experts:
            self._experts.append(experts.new_zeros((len(self.tables.pool), KV_BLOCK, experts.shape[1])))
        self._experts[0].index_put_(locations, experts)

    def recall(self, slots: Ints, positions: Ints) -> NDArray[Any]:
        """Returns the experts of these positions."""
        blocks, offsets = (
            torch.from_numpy(each).to(self._experts[0].device) for each in self.locations(slots, positions)
        )
        found: NDArray[Any] = self._experts[0][blocks, offsets].cpu().numpy()
        return found

    def _all(self) -> Iterator[Tensor]:
        return chain(chain.from_iterable(self._layers), self._experts)

    def _copy(self, sources: Ints, targets: Ints) -> None:
        for cached in self._all():
            cached[targets] = cached[sources]


def _reserve(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns zeros. On CPUs their pages are provided at the first write, and are small: huge ones would add up to
    2 MiB for the keys and for the values of each layer, and gain nothing."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = int(np.prod(shape)) * like.element_size()
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # A kernel without huge pages refuses it.
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)
