"""The paged KV cache: each slot finds its own positions again, and attention over them is that of whole sequences."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.generation.forward import attention, kv_cache
from asyncrl.engines.generation.forward.attention import DecodeBlocks, FlatTokens, attend
from asyncrl.engines.generation.forward.kv_cache import KV_BLOCK, KVCache
from asyncrl.engines.generation.sample_requests import Completion, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine

SLOTS, LIMIT = 4, 5 * KV_BLOCK - 3
LENGTHS = (KV_BLOCK, 1, 3 * KV_BLOCK + 7, 2 * KV_BLOCK + 1)
ACTIONS = st.tuples(
    st.sampled_from(["extend", "free", "swap", "copy", "park", "compact"]),
    st.integers(0, SLOTS - 1),
    st.integers(0, SLOTS - 1),
    st.integers(1, LIMIT),
)


class Mirror:
    """A cache of one layer and what must lie in it: lists of numbers, one a position of each slot."""

    def __init__(self) -> None:
        self.cache = KVCache(SLOTS, LIMIT)
        self.expected: list[list[float]] = [[] for _ in range(SLOTS)]
        self._next = 1.0

    def extend(self, slot: int, _: int, length: int) -> None:
        first = len(self.expected[slot])
        if length > first:
            new = np.arange(length - first) + self._next
            self._next += len(new)
            self.cache.allocate(slot, length)
            states = torch.from_numpy(new).float()[:, None, None]
            self.cache.write(0, self._places(slot, first, length), states, -states)
            self.expected[slot] += new.tolist()

    def free(self, slot: int, _: int, __: int) -> None:
        self.cache.free(slot)
        self.expected[slot] = []

    def swap(self, slot: int, other: int, _: int) -> None:
        self.cache.swap(slot, other)
        self.expected[slot], self.expected[other] = self.expected[other], self.expected[slot]

    def copy(self, slot: int, other: int, length: int) -> None:
        length = min(length, len(self.expected[slot]))
        if slot != other and length >= len(self.expected[other]) and length:
            self.cache.copy(slot, [other], length)
            self.expected[other] = self.expected[slot][:length]

    def park(self, slot: int, other: int, length: int) -> None:
        """Takes the beginning of a sequence out, and puts it into another slot when that is free."""
        length = min(length, len(self.expected[slot]))
        if length:
            states = self.cache.copy_out(slot, length)
            parked = self.expected[slot][:length]
            self.free(slot, 0, 0)
            if not self.expected[other]:
                self.cache.copy_in(other, length, states)
                self.expected[other] = parked

    def compact(self, _: int, __: int, ___: int) -> None:
        owned = sum(kv_cache.blocks_for(len(sequence)) for sequence in self.expected)
        if owned:
            assert owned <= self.cache.compact() <= (1 + kv_cache.MAX_HOLES) * owned

    def check(self) -> None:
        for slot, sequence in enumerate(self.expected):
            if sequence:
                none = torch.zeros(0, 1, 1)
                nowhere = torch.zeros(0, dtype=torch.int64)
                keys, values = self.cache.write(0, (nowhere, nowhere), none, none)
                at, offsets = self._places(slot, 0, len(sequence))
                assert keys[at, 0, offsets, 0].tolist() == sequence
                assert values[at, 0, offsets, 0].tolist() == [-each for each in sequence]

    def _places(self, slot: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        at, offsets = self.cache.locations(np.full(end - first, slot), np.arange(first, end))
        return torch.from_numpy(at), torch.from_numpy(offsets)


@given(st.lists(ACTIONS, max_size=25))
def test_each_slot_finds_its_own_positions_again(actions: list[tuple[str, int, int, int]]) -> None:
    mirror = Mirror()
    for name, *arguments in actions:
        getattr(mirror, name)(*arguments)
        mirror.check()


def test_memory_is_that_of_the_positions_held() -> None:
    """Not of slots times the longest: chunks of ended sequences serve others before there are more."""
    held = KVCache(64, 16 * KV_BLOCK)
    for number in range(200):
        held.allocate(number % 64, 16 * KV_BLOCK if number % 64 == 0 else KV_BLOCK)
        held.free(number % 64)
    assert held.write(0, (torch.zeros(1).long(),) * 2, torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))[0].shape[0] == 128


def sequences(dtype: torch.dtype) -> tuple[KVCache, list[torch.Tensor], list[torch.Tensor]]:
    """A cache whose slots hold random keys and values; slot 4, behind them, holds what would overflow."""
    torch.manual_seed(0)
    filled = KVCache(5, LIMIT)
    everything = [torch.randn(2, length, 2, 8).to(dtype) for length in LENGTHS]
    for slot, both in [*enumerate(everything), (4, torch.full((2, 9, 2, 8), 1e30, dtype=dtype))]:
        filled.allocate(slot, both.shape[1])
        at, offsets = (
            torch.from_numpy(each) for each in filled.locations(np.full(both.shape[1], slot), np.arange(both.shape[1]))
        )
        filled.write(0, (at, offsets), *both)
    return filled, [both[0] for both in everything], [both[1] for both in everything]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, 3.0])
def test_one_token_attends_to_its_sequence_and_nothing_else(dtype: torch.dtype, scaling: float | None) -> None:
    """In float32, whatever the cache holds: only the result is rounded."""
    filled, keys, values = sequences(dtype)
    query = torch.randn(len(LENGTHS), 4, 8).to(dtype)
    positions = np.array(LENGTHS) - 1
    blocks = DecodeBlocks.of(filled, positions, torch.device("cpu"))
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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_logprobs_are_those_of_a_plain_forward_over_many_blocks(
    make_engine: Callable[..., TorchEngine],
    requests: Callable[..., list[SampleRequest]],
    drain: Callable[..., dict[Any, Completion]],
    plain_logprobs: Callable[..., np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    kv: str,
    deterministic: bool,
) -> None:
    """Blocks of 4 positions, few at first: they are taken, given back, copied to members of a group and moved."""
    monkeypatch.setattr(kv_cache, "KV_BLOCK", 4)
    monkeypatch.setattr(attention, "KV_BLOCK", 4)
    monkeypatch.setattr(kv_cache, "FIRST_BLOCKS", 1)
    engine = make_engine(kv=kv, deterministic=deterministic)
    wanted = requests(13)
    wanted += [SampleRequest((99, member, 0), wanted[3].prompt, 7 + member, 1.0, 20) for member in range(4)]
    for completion in drain(engine, wanted).values():
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(completion, "llama"), atol=1e-5, rtol=0)
