"""Keys and values of every sequence that runs, all layers: in chunks of positions that sequences own.

    chunks      0 1 2 3 4 5 6      slot 0 owns 0 and 3, slot 1 owns 1, 5 and 4, slot 2 owns 6; chunk 2 is free

So a sequence takes the memory of its own length, attention reads no more than that, and a sequence that changes its
slot takes its chunks along.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
CHUNK = 32  # positions: half as many double the sums that attention puts together, twice as many lie idle for longer
FIRST_CHUNKS = 2  # of each slot, allocated at first; grows by doubling, so short sequences need little memory
MOST_HOLES = 1 / 8  # of the chunks that attention reads; more are filled, which copies as many chunks


class KVCache:
    """Per layer keys and values [chunks, kv heads, CHUNK, head size], allocated when a layer first writes.

    Fresh memory is zero: attention multiplies what it masks by 0, and 0 times an uninitialised NaN is NaN.

    Args:
        limit: positions of the longest sequence.
        fixed: every slot owns chunks for `limit` positions from the start, so that shapes never change.
    """

    def __init__(self, slots: int, limit: int, *, fixed: bool = False) -> None:
        most = chunks_of(limit)
        self.limit = limit
        self._most = slots * most
        self._owned: Ints = np.zeros((slots, most), np.int64)
        self._counts: Ints = np.zeros(slots, np.int64)
        self._used: NDArray[np.bool_] = np.zeros(slots * (most if fixed else min(FIRST_CHUNKS, most)), np.bool_)
        self._fixed = fixed
        self._layers: list[tuple[Tensor, Tensor]] = []
        if fixed:
            for slot in range(slots):
                self.hold(slot, limit)

    def hold(self, slot: int, length: int) -> None:
        """Let a slot own chunks for `length` positions, if it does not yet."""
        assert length <= self.limit, f"a sequence of {length} positions in slots of {self.limit}"
        while self._counts[slot] < chunks_of(length):
            chunk = int(self._used.argmin())
            if self._used[chunk]:
                chunk = len(self._used)
                self._grow()
            self._used[chunk] = True
            self._owned[slot, self._counts[slot]] = chunk
            self._counts[slot] += 1

    def hold_next(self, positions: Ints) -> None:
        """The same for the first slots, up to and including these positions."""
        for slot in np.flatnonzero(positions // CHUNK >= self._counts[: len(positions)]):
            self.hold(int(slot), int(positions[slot]) + 1)

    def release(self, slot: int) -> None:
        if not self._fixed:
            self._used[self._owned[slot, : self._counts[slot]]] = False
            self._counts[slot] = 0

    def swap(self, slot: int, other: int) -> None:
        """Exchange what two slots own."""
        for table in (self._owned, self._counts):
            table[[slot, other]] = table[[other, slot]]

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Give other slots copies of the first `length` positions of one."""
        for target in targets:
            self.hold(target, length)
        count = chunks_of(length)
        self._copy(np.tile(self._owned[source, :count], len(targets)), self._owned[targets, :count].ravel())

    def places(self, slots: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """Chunk and offset of these positions."""
        return self._owned[slots, positions // CHUNK], positions % CHUNK

    def owned(self, positions: Ints) -> tuple[Ints, Ints]:
        """Chunks of the first slots up to these positions, slot by slot, and how many of each (`fixed`: all it has)."""
        counts = self._counts[: len(positions)] if self._fixed else positions // CHUNK + 1
        return self._owned[: len(positions)][np.arange(self._owned.shape[1]) < counts[:, None]], counts

    def pack(self) -> int:
        """Chunks that begin the cache and hold all that is owned; free ones among them are few."""
        owned = int(np.count_nonzero(self._used))
        end = len(self._used) - int(self._used[::-1].argmax())
        if end - owned <= MOST_HOLES * owned:
            return end
        holes, strays = np.flatnonzero(~self._used[:owned]), owned + np.flatnonzero(self._used[owned:])
        self._copy(strays, holes)
        moved = np.arange(len(self._used))
        moved[strays] = holes
        self._owned = moved[self._owned]
        self._used[:owned], self._used[owned:] = True, False
        return owned

    def write(self, layer: int, places: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys[i], values[i] ([tokens, kv heads, head size]) at chunk places[0][i], offset places[1][i]; the whole
        layer."""
        if layer == len(self._layers):
            self._layers.append((self._new(keys), self._new(values)))
        cached_keys, cached_values = self._layers[layer]
        chunks, offsets = places
        cached_keys[chunks, :, offsets] = keys
        cached_values[chunks, :, offsets] = values
        return cached_keys, cached_values

    def _copy(self, sources: Ints, targets: Ints) -> None:
        for layer in self._layers:
            for cached in layer:
                cached[targets] = cached[sources]

    def _new(self, like: Tensor) -> Tensor:
        return like.new_zeros(len(self._used), like.shape[1], CHUNK, like.shape[2])

    def _grow(self) -> None:
        more = min(len(self._used), self._most - len(self._used))
        self._used = np.pad(self._used, (0, more))
        self._layers = [(self._grown(keys), self._grown(values)) for keys, values in self._layers]

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(len(self._used), *old.shape[1:])
        new[: len(old)] = old
        return new


def chunks_of(length: int) -> int:
    return -(-length // CHUNK)
