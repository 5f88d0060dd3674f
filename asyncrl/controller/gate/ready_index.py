"""Indexes over what is READY, so that the gate answers in a time that does not depend on how much is in flight.

CutQueue     which groups offer a cut, most urgent first      for Gate.pick and Gate.preview
StampIndex   which groups have READY samples of which age     for what becomes due or too old as the version rises
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator

Urgency = tuple[int, int]
"""A version and the id of a group; the smallest trains first. No two groups have the same urgency."""
SPARE_ENTRIES = 64
"""Number of replaced entries that the heap of a CutQueue may hold even when it is short."""


class CutQueue:
    """Keeps for each group how many samples it offers, and how urgently. samples: what all groups offer together.

    by_version: offered samples by the version of their urgency. The heap keeps entries that were replaced until they
    come up or outnumber the others, so that a change costs the logarithm of the number of offers, amortised.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.by_version = Counter[int]()
        self._offers: dict[int, tuple[Urgency, int]] = {}
        self._heap: list[Urgency] = []

    def put(self, group: int, urgency: Urgency, samples: int) -> None:
        """Replaces what this group offers."""
        known = self._offers.get(group)
        if known == (urgency, samples):
            return
        self.remove(group)
        self._offers[group] = (urgency, samples)
        self.samples += samples
        self.by_version[urgency[0]] += samples
        if known is None or known[0] != urgency:
            heapq.heappush(self._heap, urgency)
            if len(self._heap) > 2 * len(self._offers) + SPARE_ENTRIES:
                self._heap = [each for each, _ in self._offers.values()]
                heapq.heapify(self._heap)

    def remove(self, group: int) -> None:
        if (known := self._offers.pop(group, None)) is None:
            return
        (version, _), samples = known
        self.samples -= samples
        self.by_version[version] -= samples
        if not self.by_version[version]:
            del self.by_version[version]

    def most_urgent(self, samples: int) -> list[int]:
        """Returns the most urgent groups, no more than are necessary for so many samples, or all."""
        taken = dict[int, Urgency]()
        left = samples
        while left > 0 and self._heap:
            urgency = heapq.heappop(self._heap)
            group = urgency[1]
            if group not in taken and group in self._offers and self._offers[group][0] == urgency:
                taken[group] = urgency
                left -= self._offers[group][1]
        for urgency in taken.values():
            heapq.heappush(self._heap, urgency)
        return list(taken)


class StampIndex:
    """Keeps the groups that have a READY sample with each version stamp; the stamp None is kept nowhere."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, None]] = {}
        self._stamps: list[int] = []

    def add(self, stamp: int | None, group: int) -> None:
        if stamp is None:
            return
        if stamp not in self._groups:
            self._groups[stamp] = {}
            heapq.heappush(self._stamps, stamp)
        self._groups[stamp][group] = None

    def discard(self, stamp: int | None, group: int) -> None:
        if stamp in self._groups:
            self._groups[stamp].pop(group, None)

    def at(self, stamp: int) -> tuple[int, ...]:
        return tuple(self._groups.get(stamp, ()))

    def take(self, is_old: Callable[[int], bool]) -> Iterator[int]:
        """Removes the stamps that are old, and yields their groups. is_old: holds for every stamp below an old one."""
        while self._stamps and is_old(self._stamps[0]):
            yield from self._groups.pop(heapq.heappop(self._stamps))
