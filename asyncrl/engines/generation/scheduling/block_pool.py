"""The KV blocks that exist, and how many tables use each of them."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class BlockPool:
    """Counts the uses of each block. A block is free when nothing uses it; the lowest free blocks are taken first, so
    that memory which was never used stays untouched.

    room: free blocks. touched: blocks from the first one on that were ever taken.
    """

    def __init__(self, blocks: int) -> None:
        self._uses: Ints = np.zeros(blocks, np.int64)
        self.room = blocks
        self.touched = 0

    def __len__(self) -> int:
        return len(self._uses)

    def take(self, count: int) -> Ints:
        """Returns free blocks, with one use each. There must be so many."""
        assert count <= self.room, f"{count} KV blocks are wanted and {self.room} are free"
        found = np.flatnonzero(self._uses[: self.touched] == 0)[:count]
        more = np.arange(self.touched, self.touched + count - len(found))
        self.touched += len(more)
        blocks = np.concatenate([found, more])
        self._uses[blocks] = 1
        self.room -= count
        return blocks

    def share(self, blocks: Ints) -> None:
        """Adds one use to each of these blocks, which are in use."""
        self._uses[blocks] += 1

    def release(self, blocks: Ints) -> None:
        """Takes one use from each of these blocks; those without any are free."""
        self._uses[blocks] -= 1
        self.room += int(np.count_nonzero(self._uses[blocks] == 0))

    def in_use(self, blocks: Ints) -> NDArray[np.bool_]:
        return self._uses[blocks] > 0

    def swap(self, first: Ints, second: Ints) -> None:
        """Exchanges the uses of block first[i] and second[i], whose contents were exchanged."""
        self._uses[first], self._uses[second] = self._uses[second], self._uses[first]
