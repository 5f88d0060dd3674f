"""The ranges of a heap: apart from each other, joined when they are free, and few bytes lost between them."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncrl.lanes.data.row_store import UNIT, Heap, range_bytes


@given(st.integers(1, 2**40))
def test_a_range_is_at_most_a_32nd_longer_than_what_it_holds(size: int) -> None:
    assert size <= range_bytes(size) < size * 33 / 32 + UNIT
    assert range_bytes(size) % UNIT == 0
    assert range_bytes(range_bytes(size)) == range_bytes(size) <= range_bytes(size + 1)


class HeapModel(RuleBasedStateMachine):
    """Ranges that are handed out never overlap; all that is free is found, in as few pieces as possible."""

    def __init__(self) -> None:
        super().__init__()
        self.heap = Heap()
        self.held: dict[int, int] = {}

    @rule(units=st.integers(1, 100))
    def grow(self, units: int) -> None:
        self.heap.grow(units * UNIT)

    @rule(size=st.integers(1, 3000))
    def allocate(self, size: int) -> None:
        longest = max((end - start for start, end in self._gaps()), default=0)
        start = self.heap.allocate(range_bytes(size))
        assert (start is not None) == (longest >= range_bytes(size))
        if start is not None:
            self.held[start] = size

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            start = data.draw(st.sampled_from(sorted(self.held)))
            self.heap.free(start, range_bytes(self.held.pop(start)))

    @invariant()
    def ranges_are_apart(self) -> None:
        ranges = sorted((start, start + range_bytes(size)) for start, size in self.held.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert all(start >= 0 and end <= self.heap.size for start, end in ranges)
        assert self.heap.used == sum(end - start for start, end in ranges)

    @rule()
    def ask_for_the_tail(self) -> None:
        gaps = self._gaps()
        assert self.heap.tail() == (gaps[-1][1] - gaps[-1][0] if gaps and gaps[-1][1] == self.heap.size else 0)

    def _gaps(self) -> list[tuple[int, int]]:
        edges = [0, *(edge for start in sorted(self.held) for edge in (start, start + range_bytes(self.held[start])))]
        edges.append(self.heap.size)
        return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]


TestHeap = HeapModel.TestCase
TestHeap.settings = settings(max_examples=60, stateful_step_count=60)


class Lengths:
    """Lengths of answers in bytes, whose distribution may change over a run (`at` goes from 0 to 1)."""

    longest = 160_000

    def lognormal(self, chance: random.Random, at: float) -> float:
        return chance.lognormvariate(9, 1.2)

    def growing(self, chance: random.Random, at: float) -> float:
        return chance.lognormvariate(6 + 5 * at, 0.7)

    def shrinking(self, chance: random.Random, at: float) -> float:
        return chance.lognormvariate(11 - 5 * at, 0.7)

    def short_or_cut_off(self, chance: random.Random, at: float) -> float:
        return self.longest if chance.random() < 0.2 else 400

    def in_phases(self, chance: random.Random, at: float) -> float:
        return self.longest if int(20 * at) % 2 else self.longest / 7


@pytest.mark.parametrize("kind", ["lognormal", "growing", "shrinking", "short_or_cut_off", "in_phases"])
def test_gaps_cost_less_than_a_fifth_whatever_the_lengths(kind: str) -> None:
    """Groups of eight rows die together, three of four in the order of their birth."""
    chance = random.Random(1)
    heap = Heap()
    groups = []
    alive = 0
    most = 0
    for number in range(3000):
        group = []
        for _ in range(8):
            length = int(min(Lengths.longest, max(200, getattr(Lengths(), kind)(chance, number / 3000))))
            while (start := heap.allocate(range_bytes(length))) is None:
                heap.grow(UNIT * 64)
            group.append((start, length))
        groups.append(group)
        alive += sum(length for _, length in group)
        most = max(most, alive)
        if len(groups) == 64:
            dying = groups.pop(0 if chance.random() < 0.75 else chance.randrange(64))
            alive -= sum(length for _, length in dying)
            for start, length in dying:
                heap.free(start, range_bytes(length))
    assert heap.size < 1.2 * most
