"""The paged KV cache: each slot finds its own positions again, and attention over them is that of whole sequences."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.bench.generation_speed import resident_bytes
from asyncrl.engines.generation import attention
from asyncrl.engines.generation.attention import DecodeBlocks, FlatTokens, KVCache, attend
from asyncrl.engines.generation.block_pool import KV_BLOCK, MAX_HOLES, Ints, KeptBlocks

SLOTS = 4
LIMIT = 5 * KV_BLOCK - 3
LENGTHS = (KV_BLOCK, 1, 3 * KV_BLOCK + 7, 2 * KV_BLOCK + 1)
ACTIONS = st.tuples(
    st.sampled_from(["extend", "free", "swap", "copy", "keep", "share", "drop", "compact"]),
    st.integers(0, SLOTS - 1),
    st.integers(0, SLOTS - 1),
    st.integers(1, LIMIT),
)


class Mirror:
    """A cache of one layer and what must lie in it: lists of numbers, one a position of each slot."""

    def __init__(self) -> None:
        self.cache = KVCache(SLOTS, LIMIT, blocks=60)
        self.tables = self.cache.tables
        self.expected: list[list[float]] = [[] for _ in range(SLOTS)]
        self.kept: list[tuple[KeptBlocks, list[float]]] = []
        self._next = 1.0

    def extend(self, slot: int, _: int, length: int) -> None:
        first = len(self.expected[slot])
        if length > first:
            new = np.arange(length - first) + self._next
            self._next += len(new)
            self.tables.allocate(slot, length)
            states = torch.from_numpy(new).float()[:, None, None]
            self.cache.write(0, self._places(self.tables.owned[slot], first, length), states, -states)
            self.expected[slot] += new.tolist()

    def free(self, slot: int, _: int, __: int) -> None:
        self.tables.free(slot)
        self.expected[slot] = []

    def swap(self, slot: int, other: int, _: int) -> None:
        self.tables.swap(slot, other)
        self.expected[slot], self.expected[other] = self.expected[other], self.expected[slot]

    def copy(self, slot: int, other: int, length: int) -> None:
        length = min(length, len(self.expected[slot]))
        if length and not self.expected[other]:
            self.cache.copy(slot, [other], length)
            self.expected[other] = self.expected[slot][:length]

    def keep(self, slot: int, _: int, __: int) -> None:
        """Keeps the whole blocks of a slot."""
        if len(self.kept) < 6 and (whole := len(self.expected[slot]) // KV_BLOCK):
            self.kept.append((self.tables.keep(slot, whole), self.expected[slot][: whole * KV_BLOCK]))

    def share(self, slot: int, number: int, length: int) -> None:
        if number < len(self.kept) and not self.expected[slot]:
            kept, held = self.kept[number]
            count = min(len(kept.blocks), length // KV_BLOCK)
            self.tables.share(slot, kept, count)
            self.expected[slot] = held[: count * KV_BLOCK]

    def drop(self, number: int, _: int, __: int) -> None:
        if number < len(self.kept):
            self.tables.drop(self.kept.pop(number)[0])

    def compact(self, slot: int, other: int, _: int) -> None:
        slots = np.array([each for each in {slot, other} if self.expected[each]], np.int64)
        if len(slots):
            owned = {block for each in slots for block in self.tables.blocks_of(each)}
            leading = self.cache.compact(slots)
            assert len(owned) <= leading <= (1 + MAX_HOLES) * len(owned)
            assert all(self.tables.blocks_of(each).max() < leading for each in slots)

    def check(self) -> None:
        tables = [self.tables.owned[slot] for slot in range(SLOTS)] + [kept.blocks for kept, _ in self.kept]
        none = torch.zeros(0, 1, 1)
        nowhere = torch.zeros(0, dtype=torch.int64)
        keys, values = self.cache.write(0, (nowhere, nowhere), none, none)
        for table, sequence in zip(tables, self.expected + [held for _, held in self.kept], strict=True):
            at, offsets = self._places(table, 0, len(sequence))
            assert keys[at, 0, 0, offsets].tolist() == sequence
            assert values[at, 0, offsets, 0].tolist() == [-each for each in sequence]
        in_use = {block for slot in range(SLOTS) for block in self.tables.blocks_of(slot)}
        in_use |= {block for kept, _ in self.kept for block in kept.blocks}
        assert self.tables.pool.room == 60 - len(in_use)

    def _places(self, table: Ints, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = np.arange(first, end)
        return torch.from_numpy(table[positions // KV_BLOCK]), torch.from_numpy(positions % KV_BLOCK)


@given(st.lists(ACTIONS, max_size=25))
def test_each_slot_finds_its_own_positions_again(actions: list[tuple[str, int, int, int]]) -> None:
    mirror = Mirror()
    for name, *arguments in actions:
        getattr(mirror, name)(*arguments)
        mirror.check()


def test_the_system_provides_no_more_than_the_blocks_that_are_written() -> None:
    """With huge pages each of the two tensors would have 2 MiB or more; with zeros of torch, all of its pages."""
    held = KVCache(64, 64 * KV_BLOCK)
    held.tables.allocate(0, KV_BLOCK)
    written = torch.zeros(KV_BLOCK, 1, 64)
    held.write(0, (torch.zeros(KV_BLOCK).long(), torch.arange(KV_BLOCK)), written, written)
    assert held.bytes == 2 * KV_BLOCK * 64 * 4
    assert resident_bytes(held._layers[0]) == held.bytes


def test_memory_is_that_of_the_positions_held() -> None:
    """Not of slots times the longest: blocks of ended sequences serve others before there are more."""
    held = KVCache(64, 16 * KV_BLOCK)
    for number in range(200):
        held.tables.allocate(number % 64, 16 * KV_BLOCK if number % 64 == 0 else KV_BLOCK)
        held.tables.free(number % 64)
    held.write(0, (torch.zeros(1).long(),) * 2, torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))
    assert held.bytes == 16 * KV_BLOCK * 2 * 4 * 4


def fill(cache: KVCache, slot: int, begin: int, both: torch.Tensor) -> None:
    """Writes keys and values [2, tokens, kv heads, size] from a position on."""
    cache.tables.allocate(slot, begin + both.shape[1])
    at, offsets = cache.locations(np.full(both.shape[1], slot), np.arange(begin, begin + both.shape[1]))
    cache.write(0, (torch.from_numpy(at), torch.from_numpy(offsets)), *both)


def sequences(dtype: torch.dtype) -> tuple[KVCache, list[torch.Tensor], list[torch.Tensor]]:
    """A cache whose slots hold random keys and values; slot 4, behind them, holds what would overflow."""
    torch.manual_seed(0)
    filled = KVCache(5, LIMIT)
    everything = [torch.randn(2, length, 2, 8).to(dtype) for length in LENGTHS]
    for slot, both in [*enumerate(everything), (4, torch.full((2, 9, 2, 8), 1e30, dtype=dtype))]:
        fill(filled, slot, 0, both)
    return filled, [both[0] for both in everything], [both[1] for both in everything]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, 3.0])
def test_one_token_attends_to_its_sequence_and_nothing_else(dtype: torch.dtype, scaling: float | None) -> None:
    """In float32, whatever the cache holds: only the result is rounded."""
    filled, keys, values = sequences(dtype)
    query = torch.randn(len(LENGTHS), 4, 8).to(dtype)
    positions = np.array(LENGTHS) - 1
    blocks = DecodeBlocks.of(filled, np.arange(len(LENGTHS)), positions, torch.device("cpu"))
    places = tuple(torch.from_numpy(each) for each in filled.locations(np.arange(len(LENGTHS)), positions))
    flat = FlatTokens(filled, places, torch.from_numpy(positions), blocks, [])
    newest_keys, newest_values = (torch.stack([sequence[-1] for sequence in each]) for each in (keys, values))
    found = attend(0, query, newest_keys, newest_values, flat, scaling)
    assert found.dtype == dtype
    for row, (own_keys, own_values) in enumerate(zip(keys, values, strict=True)):
        wide = [each.double().repeat_interleave(2, dim=1) for each in (own_keys, own_values)]
        scores = torch.einsum("hd,phd->hp", query[row].double(), wide[0]) * (8**-0.5 if scaling is None else scaling)
        expected = torch.einsum("hp,phd->hd", scores.softmax(-1), wide[1])
        rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found[row].double(), expected, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize(
    ("sharers", "dtype"), [(2, torch.float32), (7, torch.bfloat16), (20, torch.float32), (20, torch.bfloat16)]
)
def test_sequences_that_share_blocks_attend_as_if_they_had_copies(
    sharers: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with blocks that different numbers of sequences share, and a cache that is read in tiles of few blocks."""
    monkeypatch.setattr(attention, "TILE_NUMBERS", (3 * 2 * KV_BLOCK * 8,) * 2)
    torch.manual_seed(0)
    caches = [KVCache(sharers + 1, LIMIT) for _ in range(2)]
    first = torch.randn(2, 2 * KV_BLOCK, 2, 8).to(dtype)
    own = torch.randn(sharers, 2, 2, 2, 8).to(dtype)
    query = torch.randn(sharers, 4, 8).to(dtype)
    found = []
    for cache, shares in zip(caches, (True, False), strict=True):
        fill(cache, 0, 0, first)
        kept = cache.tables.keep(0, 2)
        for slot in range(1, sharers + 1):
            whole = 1 + slot % 2
            if shares:
                cache.tables.share(slot, kept, whole)
            else:
                cache.copy(0, [slot], whole * KV_BLOCK)
            fill(cache, slot, whole * KV_BLOCK, own[slot - 1])
        slots = np.arange(1, sharers + 1)
        positions = (1 + slots % 2) * KV_BLOCK + 1
        blocks = DecodeBlocks.of(cache, slots, positions, torch.device("cpu"))
        assert (blocks.shared is not None) == shares
        places = tuple(torch.from_numpy(each) for each in cache.locations(slots, positions))
        flat = FlatTokens(cache, places, torch.from_numpy(positions), blocks, [])
        found.append(attend(0, query, own[:, 0, 1], own[:, 1, 1], flat, None))
    torch.testing.assert_close(found[0], found[1])
