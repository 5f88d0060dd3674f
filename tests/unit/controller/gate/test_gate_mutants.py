"""Named ways to break the gate, each of which random schedules must find."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from asyncrl.controller.gate.gate import Gate, StampIndex, Urgency
from asyncrl.controller.gate.group_state import Cut, GroupState, SampleState, Stage
from asyncrl.errors import AsyncrlError
from asyncrl.protocols.staleness import live

SEEDS = 500


class ExpiresOneVersionLate(Gate):
    def too_old(self, stamp: int) -> bool:
        return not live(stamp, self.version, self.config.limit + 1)


class ExpiresAtTheLimit(Gate):
    def too_old(self, stamp: int) -> bool:
        return self.version - stamp >= self.config.limit


class StaleByTheLastToken(Gate):
    def expiry_stamp(self, sample: SampleState) -> int | None:
        return sample.last if self.config.policy in ("mask", "drop") else None


class StaleByTheFirstToken(Gate):
    def expiry_stamp(self, sample: SampleState) -> int | None:
        return sample.first if self.config.policy in ("mask", "drop") else None


class DueUnnoticedWhenTheVersionRises(Gate):
    def _raise_version(self) -> None:
        stamps = self._stamps
        self._stamps = StampIndex()
        super()._raise_version()
        self._stamps = stamps


class OverdueFromTheVersionOfThePast(Gate):
    def _raise_version(self) -> None:
        overdue = self._counts.overdue
        super()._raise_version()
        self._counts.overdue = overdue


class RewardsOfSiblingsUnnoticed(Gate):
    def _reconsider(self, number: int) -> None:
        known = self._offers._offers.get(number)
        super()._reconsider(number)
        if known is not None and number in self._groups and self._groups[number].members(Stage.READY):
            self._offers.put(number, *known)


class UselessGroupsStay(Gate):
    def usable(self, group: GroupState) -> bool:
        return len(group.rewards()) > 0


class DueIgnored(Gate):
    def due(self, group: GroupState) -> bool:
        return False


class DueOneVersionLate(Gate):
    def due(self, group: GroupState) -> bool:
        return any(s.stage is Stage.READY and self.too_old(s.last) for s in group.samples)


class CutBelowTwo(Gate):
    def may_cut(self, group: GroupState) -> bool:
        return super().may_cut(group) or self.due(group)


class CutUnderDrop(Gate):
    def may_cut(self, group: GroupState) -> bool:
        return super().may_cut(group) or (self.config.policy == "drop" and len(group.rewards()) > 1)


class CreditOfScoringNotCounted(Gate):
    def held(self) -> int:
        return super().held() - self.counts[Stage.SCORING]


class CreditOfTrainingNotCounted(Gate):
    def held(self) -> int:
        return super().held() - self.counts[Stage.TRAINING]


class OverdueCounted(Gate):
    def held(self) -> int:
        return self.in_flight


class CapIgnored(Gate):
    def may_draw(self) -> bool:
        return self.held() + self.config.members <= self.config.credits and not self._stopped


class StaleAttemptAccepted(Gate):
    def _current(self, group: int, member: int, attempt: int, stage: Stage) -> SampleState | None:
        current = self._groups[group].samples[member].attempt if group in self._groups else attempt
        return super()._current(group, member, current, stage)


class RepetitionAccepted(Gate):
    def _current(self, group: int, member: int, attempt: int, stage: Stage) -> SampleState | None:
        sample = self._groups[group].samples[member] if group in self._groups else None
        same = sample is not None and sample.attempt == attempt and sample.stage is not Stage.RUNNING
        return sample if same else super()._current(group, member, attempt, stage)


class RequeueLost(Gate):
    def requeue(self, cuts: Iterable[Cut]) -> None:
        for group, members in cuts:
            self.restart(group, members)


class TrainsAgain(Gate):
    def trained(self, cuts: Iterable[Cut], version: int) -> None:
        self.requeue(cuts)
        self.version = version


class NeverForgets(Gate):
    def _forget(self, group: int) -> None:
        pass


class BlockLooksAtThisIterationOnly(Gate):
    def fits_deadlines(self) -> bool:
        taken = dict(self._urgent_cuts())
        latest = self.version - self.config.limit
        groups = [group for group in self._groups.values() if group.drawn_at <= latest]
        return all(group.id in taken for group in groups)


class BlockStartsOldWeights(Gate):
    def not_before(self, group: int) -> int:
        return self.version - self.config.limit


class ShortBatchTooSoon(Gate):
    @property
    def exhausted(self) -> bool:
        return not self.counts[Stage.SCORING] and not self.may_draw()


class NewestFirst(Gate):
    def _urgency(self, group: GroupState) -> Urgency:
        last, number = super()._urgency(group)
        return (-last, number)


GATE_MUTANTS = [mutant for mutant in Gate.__subclasses__() if mutant.__module__ == __name__]
RARELY_FOUND: Mapping[type[Gate], int] = {CapIgnored: 228, BlockLooksAtThisIterationOnly: 51}
"""Mutants that few schedules find, and a seed that does; it changes when schedules are drawn in another way."""


@pytest.mark.parametrize("mutant", GATE_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_gate_is_found(world: type[Any], mutant: type[Gate]) -> None:
    assert found_at(world, mutant) is not None, f"{mutant.__name__} survives {SEEDS} schedules"


def found_at(world: type[Any], mutant: type[Gate]) -> int | None:
    """A seed whose schedule the mutant does not survive; `world(seed, mutant).run()` replays it."""
    for seed in (RARELY_FOUND.get(mutant, 0), *range(SEEDS)):
        try:
            world(seed, mutant).run()
        except (AssertionError, AsyncrlError, KeyError):
            return seed
    return None
