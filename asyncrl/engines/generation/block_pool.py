"""Blocks of the KV cache: how often each is used, which of them a sequence owns, and how many an experiment has;
without torch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import Config
from asyncrl.engines.models.model_folder import longest_row
from asyncrl.errors import ConfigError

Ints = NDArray[np.int64]


# The KV blocks that exist, and how many tables use each of them.


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


# Records which KV blocks a sequence owns: a table for each slot, and tables that are kept for later.
#
#     blocks      0 1 2 3 4 5 6 7     slot 0 owns 0 1 3, slot 1 owns 0 1 5: 0 and 1 hold the prompt that both have
#                                     a parked sequence keeps 2 6; block 4 is free
#
# Only whole blocks are shared, because a sequence writes into its last one.


KV_BLOCK = 32  # positions; 16 doubles the partial sums that attention combines, 64 leaves more positions unused
MAX_HOLES = 1 / 8  # blocks without a decoding sequence among those that attention reads; with more, blocks are moved


@dataclass(slots=True, eq=False)
class KeptBlocks:
    """Holds the blocks of a sequence without a slot; `BlockTables` renames them when blocks are moved."""

    blocks: Ints


class BlockTables:
    """Holds the blocks of each slot. owned: int64 [slots, most blocks of a slot]. counts: int64 [slots], how many of
    these each slot owns.

    The pool counts one use of a block for each slot and each KeptBlocks that has it, and a block that a slot writes to
    has no other use. BlockMemory gives and takes blocks; KVCache.compact moves them.

    Args:
        most: blocks of the longest sequence.
        blocks: of all sequences together.
        fixed: every slot owns the same blocks for ever, so that shapes never change.
    """

    def __init__(self, slots: int, most: int, blocks: int, *, fixed: bool = False) -> None:
        self.pool = BlockPool(blocks)
        self.owned: Ints = np.zeros((slots, most), np.int64)
        self.counts: Ints = np.zeros(slots, np.int64)
        self.fixed = fixed
        self._kept: dict[int, KeptBlocks] = {}
        if fixed:
            for slot in range(slots):
                self.allocate(slot, most * KV_BLOCK)

    def lacking(self, slot: int, length: int) -> int:
        """Returns how many blocks a slot lacks for `length` positions."""
        return max(0, blocks_for(length) - int(self.counts[slot]))

    def allocate(self, slot: int, length: int) -> None:
        """Gives a slot the blocks that it lacks for `length` positions."""
        if more := self.lacking(slot, length):
            first = int(self.counts[slot])
            self.owned[slot, first : first + more] = self.pool.take(more)
            self.counts[slot] += more

    def blocks_of(self, slot: int) -> Ints:
        return self.owned[slot, : self.counts[slot]]

    def free(self, slot: int) -> None:
        if not self.fixed:
            self.pool.release(self.blocks_of(slot))
            self.counts[slot] = 0

    def swap(self, slot: int, other: int) -> None:
        for table in (self.owned, self.counts):
            table[[slot, other]] = table[[other, slot]]

    def share(self, slot: int, kept: KeptBlocks, count: int) -> None:
        """Gives a slot without blocks the first `count` kept ones, which are kept as before."""
        assert not self.counts[slot], f"slot {slot} has blocks already"
        self.pool.share(kept.blocks[:count])
        self.owned[slot, :count] = kept.blocks[:count]
        self.counts[slot] = count

    def keep(self, slot: int, count: int) -> KeptBlocks:
        """Keeps the first `count` blocks of a slot, which goes on using them."""
        kept = KeptBlocks(self.blocks_of(slot)[:count].copy())
        self.pool.share(kept.blocks)
        self._kept[id(kept)] = kept
        return kept

    def drop(self, kept: KeptBlocks) -> None:
        """Keeps these blocks no longer."""
        del self._kept[id(kept)]
        self.pool.release(kept.blocks)

    def compact(self, slots: Ints) -> tuple[int, Ints, Ints]:
        """Moves the blocks of these slots to the front if there are many others among them.

        Returns how many leading blocks have all of theirs, and those whose contents have to be exchanged in pairs.
        """
        mine = self.owned[slots][np.arange(self.owned.shape[1]) < self.counts[slots, None]]
        nothing: Ints = np.zeros(0, np.int64)
        if self.fixed:
            return len(self.pool), nothing, nothing
        wanted = np.zeros(self.pool.touched, np.bool_)
        wanted[mine] = True
        count = int(np.count_nonzero(wanted))
        end = len(wanted) - int(wanted[::-1].argmax())
        if end - count <= MAX_HOLES * count:
            return end, nothing, nothing
        holes = np.flatnonzero(~wanted[:count])
        strays = count + np.flatnonzero(wanted[count:])
        self._rename(holes, strays)
        return count, holes, strays

    def _rename(self, first: Ints, second: Ints) -> None:
        names = np.arange(len(self.pool))
        names[first] = second
        names[second] = first
        self.owned = names[self.owned]
        for kept in self._kept.values():
            kept.blocks = names[kept.blocks]
        self.pool.swap(first, second)


def blocks_for(length: int) -> int:
    """Returns how many blocks have room for `length` positions."""
    return -(-length // KV_BLOCK)


# The number of blocks that the KV cache of an experiment has.


GB = 10**9
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
FIXED_ROWS = 16
"""Fewest slots of deterministic mode: products over fewer rows than 4 (an AMD EPYC) or 16 (an Intel Xeon, of vectors of
576 numbers and more) round differently from larger ones."""


def engine_slots(config: Config) -> int:
    """Returns the rows of the batch of the torch engine."""
    generation = config.generation
    return max(generation.slots, FIXED_ROWS) if generation.deterministic else generation.slots


def cache_blocks(config: Config, shape: Any, slots: int, ranks: int = 1, layers: int | None = None) -> int:
    """Returns what `blocks_within` does. shape: the config of transformers. ranks: that share out its heads. layers: of
    the stage with most of them; None where ranks have all."""
    return blocks_within(config, block_bytes(shape, ITEM_BYTES[config.model.dtype], ranks, layers), slots)


def blocks_within(config: Config, bytes_of_block: int, slots: int) -> int:
    """Returns the blocks within `generation.cache_gb`, at most those of the longest row in every slot. Raises
    ConfigError when the cache would not hold one row, or in deterministic mode not all."""
    generation = config.generation
    whole = blocks_for(longest_row(config))
    if not generation.cache_gb:
        return slots * whole
    found = min(slots * whole, int(generation.cache_gb * GB / bytes_of_block))
    least = slots * whole if generation.deterministic else whole
    if found < least:
        rows = f"{slots} rows, which generation.deterministic keeps," if generation.deterministic else "one row"
        raise ConfigError(
            f"generation.cache_gb: {generation.cache_gb:g} GB do not hold the keys and values of {rows} of the longest "
            f"length, which take {least * bytes_of_block / GB:.3g} GB; raise generation.cache_gb or lower "
            "generation.max_new_tokens"
        )
    return found


def block_bytes(shape: Any, itemsize: int, ranks: int = 1, layers: int | None = None) -> int:
    """Returns the bytes of one block in so many layers of a model, or in all, at each of the ranks that share out its
    heads. shape: the config of transformers."""
    heads = shape.num_attention_heads
    kv_heads = getattr(shape, "num_key_value_heads", None) or heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    return int(2 * (layers or shape.num_hidden_layers) * (kv_heads // ranks) * size * KV_BLOCK * itemsize)
