"""The paged KV cache: keys and values of all running sequences and layers, in blocks of positions that slots own.

    blocks      0 1 2 3 4 5 6      slot 0 owns 0 and 3, slot 1 owns 1, 5 and 4, slot 2 owns 6; block 2 is free

A sequence uses the memory of its own length, attention reads no more than that, and a sequence that moves to another
slot takes its blocks along.
"""

from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

Ints = NDArray[np.int64]
States = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [blocks, kv heads, KV_BLOCK, head size]
KV_BLOCK = 32  # positions; 16 doubles the partial sums that attention combines, 64 leaves more positions unused
FIRST_BLOCKS = 2  # blocks per slot allocated at first; the cache grows by doubling, so short sequences need little
MAX_HOLES = 1 / 8  # free blocks among those that attention reads; with more, `compact` moves blocks


class KVCache:
    """Holds per layer keys and values [blocks, kv heads, KV_BLOCK, head size], allocated at the first write.

    New memory is zero, because attention multiplies masked positions by 0, and 0 times an uninitialised NaN is NaN.

    Args:
        limit: positions of the longest sequence.
        fixed: every slot owns blocks for `limit` positions from the start, so that shapes never change.
    """

    def __init__(self, slots: int, limit: int, *, fixed: bool = False) -> None:
        most = blocks_for(limit)
        self._most = slots * most
        self._owned: Ints = np.zeros((slots, most), np.int64)
        self._counts: Ints = np.zeros(slots, np.int64)
        self._used: NDArray[np.bool_] = np.zeros(slots * (most if fixed else min(FIRST_BLOCKS, most)), np.bool_)
        self._fixed = fixed
        self._layers: States = []
        if fixed:
            for slot in range(slots):
                self.allocate(slot, limit)

    @property
    def used(self) -> float:
        """Returns the share of the blocks that the cache may grow to which slots own."""
        return 1.0 - self.room / self._most

    @property
    def room(self) -> int:
        """Returns the blocks that the cache may grow to and that no slot owns."""
        return self._most - int(np.count_nonzero(self._used))

    def allocate(self, slot: int, length: int) -> None:
        """Gives a slot the blocks that it lacks for `length` positions."""
        while self._counts[slot] < blocks_for(length):
            block = int(self._used.argmin())
            if self._used[block]:
                block = len(self._used)
                self._grow()
            self._used[block] = True
            self._owned[slot, self._counts[slot]] = block
            self._counts[slot] += 1

    def allocate_next(self, positions: Ints) -> None:
        """Gives the first slots the blocks that they lack up to and including these positions."""
        for slot in np.flatnonzero(positions // KV_BLOCK >= self._counts[: len(positions)]):
            self.allocate(int(slot), int(positions[slot]) + 1)

    def free(self, slot: int) -> None:
        if not self._fixed:
            self._used[self._owned[slot, : self._counts[slot]]] = False
            self._counts[slot] = 0

    def swap(self, slot: int, other: int) -> None:
        for table in (self._owned, self._counts):
            table[[slot, other]] = table[[other, slot]]

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Copies the first `length` positions of one slot to other slots."""
        if not targets:
            return
        for target in targets:
            self.allocate(target, length)
        count = blocks_for(length)
        self._copy_blocks(np.tile(self._owned[source, :count], len(targets)), self._owned[targets, :count].ravel())

    def copy_out(self, slot: int, length: int) -> States:
        """Returns copies of the blocks with the first `length` positions of a slot."""
        blocks = self._owned[slot, : blocks_for(length)]
        return [(keys[blocks], values[blocks]) for keys, values in self._layers]

    def copy_in(self, slot: int, length: int, states: States) -> None:
        """Gives a slot without blocks the first `length` positions that `copy_out` returned."""
        self.allocate(slot, length)
        blocks = self._owned[slot, : blocks_for(length)]
        for cached, states_of_layer in zip(self._layers, states, strict=True):
            for target, source in zip(cached, states_of_layer, strict=True):
                target[blocks] = source

    def first_blocks(self, slots: list[int], length: int) -> Ints:
        """Returns for each slot the blocks of the first `length` positions [slots, blocks]; a slot that owns fewer has
        any others behind its own."""
        return self._owned[slots, : blocks_for(length)]

    def locations(self, slots: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """Returns block and offset of these positions."""
        return self._owned[slots, positions // KV_BLOCK], positions % KV_BLOCK

    def blocks_up_to(self, positions: Ints) -> tuple[Ints, Ints]:
        """Returns the blocks of the first slots up to these positions (with `fixed` all), and their number per slot."""
        counts = self._counts[: len(positions)] if self._fixed else positions // KV_BLOCK + 1
        return self._owned[: len(positions)][np.arange(self._owned.shape[1]) < counts[:, None]], counts

    def compact(self) -> int:
        """Moves blocks to the front if there are many holes; returns how many leading blocks hold all used ones."""
        used = int(np.count_nonzero(self._used))
        end = len(self._used) - int(self._used[::-1].argmax())
        if end - used <= MAX_HOLES * used:
            return end
        holes, strays = np.flatnonzero(~self._used[:used]), used + np.flatnonzero(self._used[used:])
        self._copy_blocks(strays, holes)
        moved = np.arange(len(self._used))
        moved[strays] = holes
        self._owned = moved[self._owned]
        self._used[:used] = True
        self._used[used:] = False
        return used

    def write(
        self, layer: int, locations: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stores keys and values [tokens, kv heads, head size] at these blocks and offsets, int64 [tokens] each.

        Returns the keys and values of the whole layer.
        """
        if layer == len(self._layers):
            shape = (len(self._used), keys.shape[1], KV_BLOCK, keys.shape[2])
            self._layers.append((keys.new_zeros(shape), values.new_zeros(shape)))
        blocks, offsets = locations
        for cached, new in zip(self._layers[layer], (keys, values), strict=True):
            cached[blocks, :, offsets] = new
        return self._layers[layer]

    def _copy_blocks(self, sources: Ints, targets: Ints) -> None:
        for cached in chain.from_iterable(self._layers):
            cached[targets] = cached[sources]

    def _grow(self) -> None:
        more = min(len(self._used), self._most - len(self._used))
        self._used = np.pad(self._used, (0, more))
        padding = (0, 0, 0, 0, 0, 0, 0, more)
        self._layers = [(pad(keys, padding), pad(values, padding)) for keys, values in self._layers]


def blocks_for(length: int) -> int:
    return -(-length // KV_BLOCK)
