"""Sequences whose environment is asked: their blocks stay where they are until the next turn takes them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation.scheduling.block_pool import Ints
from asyncrl.engines.generation.scheduling.block_tables import BlockTables, KeptBlocks
from asyncrl.engines.generation.scheduling.sample_requests import Key

Sample = tuple[int, int]  # group, member: another attempt may go on where the last one was


@dataclass(frozen=True, slots=True, eq=False)
class ParkedSequence:
    """tokens: those whose keys and values the blocks hold. attempt: at its group, that sampled it."""

    tokens: Ints
    kept: KeptBlocks
    attempt: int = 0

    @property
    def blocks(self) -> int:
        return len(self.kept.blocks)


class ParkedSequences:
    """Keeps parked sequences until they are taken, evicted or forgotten. They are bounded by the KV blocks of the
    cache: a running sequence that needs blocks evicts them, those first that are needed last. blocks: of all. hits,
    misses: sequences that went on with their keys and values, and those whose were gone."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._parked: dict[Sample, ParkedSequence] = {}  # in the order in which they were parked
        self._queued: dict[Sample, ParkedSequence] = {}  # those whose next turn waits for a slot, in this order
        self.blocks = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._parked) + len(self._queued)

    def park(self, sample: Sample, sequence: ParkedSequence) -> None:
        self._remove(sample)
        self._parked[sample] = sequence
        self.blocks += sequence.blocks

    def queue(self, sample: Sample) -> None:
        """Notes that the next turn of a sample waits for a slot, behind those of others."""
        if (found := self._parked.pop(sample, None)) is not None:
            self._queued[sample] = found

    def take(self, sample: Sample, tokens: NDArray[np.int32], slot: int) -> int:
        """Gives a slot without blocks those of a sample, if there is one with which these tokens begin. Returns how
        many tokens they hold, 0 without any; the newest token is never one of them, because it has to be computed: a
        conversation that begins again may be no longer than what was parked. The sample is parked no longer."""
        found = self._find(sample)
        held = 0
        if found is not None and np.array_equal(found.tokens, tokens[: len(found.tokens)]):
            held = min(len(found.tokens), len(tokens) - 1)
        if found is not None and held:
            self._tables.share(slot, found.kept, found.blocks)
        self._remove(sample)
        self.hits += held > 0
        self.misses += held == 0
        return held

    def evict_one(self) -> bool:
        """Gives up a sequence whose environment is still asked, the one that was parked first, or else the last one in
        the queue for slots; returns whether there was one."""
        if not len(self):
            return False
        self._remove(next(iter(self._parked)) if self._parked else next(reversed(self._queued)))
        return True

    def forget(self, samples: Iterable[Key], oldest: int = 0) -> None:
        """Gives up the sequences of these samples, in these attempts and earlier ones, and of groups from 0 up to,
        without, `oldest`."""
        for group, member, attempt in samples:
            found = self._find((group, member))
            if found is not None and found.attempt <= attempt:
                self._remove((group, member))
        if len(self) and oldest:
            for sample in [sample for sample in (*self._parked, *self._queued) if 0 <= sample[0] < oldest]:
                self._remove(sample)

    def clear(self) -> None:
        while self.evict_one():
            pass

    def _find(self, sample: Sample) -> ParkedSequence | None:
        return self._parked.get(sample) or self._queued.get(sample)

    def _remove(self, sample: Sample) -> None:
        found = self._parked.pop(sample, None) or self._queued.pop(sample, None)
        if found is not None:
            self.blocks -= found.blocks
            self._tables.drop(found.kept)
