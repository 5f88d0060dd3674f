"""Counts of what is in flight, kept up to date sample by sample."""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import accumulate

from asyncrl.controller.gate.group_state import IN_FLIGHT, GroupState, SampleState, Stage


class SampleCounts:
    """Counts samples by stage, and those in flight by the version that their group was drawn at.

    too_old: whether tokens sampled at a version may not enter the loss any more. overdue: RUNNING samples whose attempt
    began at such a version.
    """

    def __init__(self, too_old: Callable[[int], bool]) -> None:
        self.stages = Counter[Stage]()
        self.drawn_at = Counter[int]()
        self.overdue = 0
        self._too_old = too_old
        self._running_since = Counter[int]()

    def add(self, group: GroupState) -> None:
        """Counts the members of a group that are in flight."""
        members = group.members(*IN_FLIGHT)
        self.drawn_at[group.drawn_at] += len(members)
        for member in members:
            self.count(group.samples[member], +1)

    def count(self, sample: SampleState, change: int) -> None:
        self.stages[sample.stage] += change
        if sample.stage is Stage.RUNNING and self._too_old(sample.since):
            self.overdue += change
        elif sample.stage is Stage.RUNNING:
            self._running_since[sample.since] += change

    def move(self, sample: SampleState, stage: Stage) -> None:
        """Moves a sample on. No sample moves to RUNNING: a new attempt makes a new one."""
        assert stage is not Stage.RUNNING, "count a new sample instead"
        if sample.stage is Stage.RUNNING:
            self.count(sample, -1)
        else:
            self.stages[sample.stage] -= 1
        sample.stage = stage
        self.stages[stage] += 1

    def ended(self, group: GroupState) -> None:
        """Takes one sample of the group out of those in flight."""
        self.drawn_at[group.drawn_at] -= 1
        if not self.drawn_at[group.drawn_at]:
            del self.drawn_at[group.drawn_at]

    def version_rose(self) -> None:
        overdue = [since for since in self._running_since if self._too_old(since)]
        self.overdue += sum(self._running_since.pop(since) for since in overdue)

    def leaves(self, taken: Mapping[int, int], most: int, may_leave: Callable[[int], int]) -> bool:
        """Returns whether taking these samples leaves, of those drawn at each version or before, no more than allowed.

        taken: by version of the draw; most: of them together. may_leave: how many may be left, by version of the draw.
        """
        drawn_at = sorted(self.drawn_at)
        in_flight = accumulate(self.drawn_at[version] for version in drawn_at)
        leaving = accumulate(taken.get(version, 0) for version in drawn_at)
        found = zip(drawn_at, in_flight, leaving, strict=True)
        return all(flying - min(gone, most) <= may_leave(version) for version, flying, gone in found)
