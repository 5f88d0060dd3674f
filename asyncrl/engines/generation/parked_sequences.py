"""Keys and values of sequences whose environment is asked, kept for their next turn."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation.forward.kv_cache import Ints, States, blocks_for
from asyncrl.engines.generation.sample_requests import Key

Sample = tuple[int, int]  # group, member: another attempt may go on where the last one was


@dataclass(frozen=True, slots=True, eq=False)
class ParkedSequence:
    """tokens: those whose keys and values the states are. attempt: at its group, that sampled it."""

    tokens: Ints
    states: States
    attempt: int = 0

    @property
    def blocks(self) -> int:
        return blocks_for(len(self.tokens))


class ParkedSequences:
    """Keeps parked sequences, the oldest first, until they are taken, evicted or forgotten. The engine bounds them by
    the KV blocks that its cache may still use. blocks: of all. hits, misses: sequences that went on with their keys and
    values, and those whose were gone."""

    def __init__(self) -> None:
        self._parked: dict[Sample, ParkedSequence] = {}
        self.blocks = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, sample: Sample, sequence: ParkedSequence) -> None:
        self._remove(sample)
        self._parked[sample] = sequence
        self.blocks += sequence.blocks

    def take(self, sample: Sample, tokens: NDArray[np.int32]) -> ParkedSequence | None:
        """Returns the sequence of a sample, if there is one with which these tokens begin, and parks it no longer."""
        found = self._remove(sample)
        if found is None or not np.array_equal(found.tokens, tokens[: len(found.tokens)]):
            self.misses += 1
            return None
        self.hits += 1
        return found

    def evict_to(self, blocks: int) -> None:
        """Gives up the sequences that have been parked for the longest time, until so many blocks are left at most."""
        while self.blocks > blocks:
            self._remove(next(iter(self._parked)))

    def forget(self, samples: Iterable[Key], oldest: int = 0) -> None:
        """Gives up the sequences of these samples, in these attempts and earlier ones, and of groups from 0 up to,
        without, `oldest`."""
        for group, member, attempt in samples:
            found = self._parked.get((group, member))
            if found is not None and found.attempt <= attempt:
                self._remove((group, member))
        if self._parked and oldest:
            for sample in [sample for sample in self._parked if 0 <= sample[0] < oldest]:
                self._remove(sample)

    def clear(self) -> None:
        self._parked.clear()
        self.blocks = 0

    def _remove(self, sample: Sample) -> ParkedSequence | None:
        found = self._parked.pop(sample, None)
        self.blocks -= 0 if found is None else found.blocks
        return found
