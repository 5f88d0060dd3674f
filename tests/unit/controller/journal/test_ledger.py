"""The ledger takes every legal history and refuses what cannot follow it; named mutants let something pass."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.controller.gate.group_state import Stage
from asyncrl.controller.journal.journal import Journal, Scan
from asyncrl.controller.journal.ledger import (
    AttemptStarted,
    CheckpointMade,
    Compared,
    Drawn,
    Dropped,
    Generated,
    InFlight,
    Ledger,
    Record,
    Resumed,
    Scored,
    Trained,
)
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.errors import IllegalTransition, JournalError, TrainedTwice
from tests.unit.controller.journal.saga import Run

SEEDS = 500


def ledger_of(records: list[Record], made: Callable[[], Ledger] = Ledger) -> Ledger:
    ledger = made()
    for record in records:
        ledger.apply(record)
    return ledger


@settings(max_examples=200)
@given(seed=st.integers(0, 10**9), steps=st.integers(0, 80))
def test_a_legal_history_is_taken_and_its_account_is_right(seed: int, steps: int) -> None:
    history = Run(seed).go(steps)
    ledger = ledger_of(history.records)
    assert InFlight(ledger.in_flight()) == history.in_flight()
    assert ledger.balanced()
    assert (ledger.version, ledger.next_group, ledger.chain) == (history.version, len(history.newest), history.chain)
    assert (ledger.drawn, ledger.trained) == (len(history.stages), len(history.at("trained")))
    assert ledger.dropped.total() == len(history.at("dropped"))
    ledger.apply(history.in_flight())


def impossible(history: Run) -> Iterator[Record]:
    """Records that cannot come next, each for another reason."""
    group = len(history.newest)
    version = history.version
    yield Drawn(group + 1, version, 3)
    yield Drawn(group - 1, version, 3)
    yield Drawn(group, version + 1, 3)
    yield Trained(version, (), (), "")
    yield Trained(version + 2, (), (), "")
    yield InFlight(((group, (0,)),))
    yield CheckpointMade(version + 1, "")
    yield Resumed(0, version, 0)
    yield Resumed(1, version + 1, 0)
    yield Generated(group, 0, ((0, version, version, 5),))
    yield Compared(group, 1.0)
    finished = [number for number in history.newest if number not in dict(history.in_flight().groups)]
    yield from (Compared(number, 1.0) for number in finished)
    for (number, member), stage in history.stages.items():
        attempt = history.attempts[number, member]
        generated = ((member, version, version, 5),)
        yield AttemptStarted(number, history.newest[number], (member,), "not risen")
        yield Generated(number, attempt + 1, generated)
        if attempt:
            yield Generated(number, attempt - 1, generated)
        if stage != "running":
            yield Generated(number, attempt, generated)
        if stage != "scoring":
            yield Scored(number, member, 1.0)
        if stage != "ready":
            yield Trained(version + 1, ((number, (member,)),), (0.0,), "")
        if stage in ("trained", "dropped"):
            yield Dropped(number, (member,), "stale")
            yield AttemptStarted(number, history.newest[number] + 1, (member,), "too late")
        yield Scored(number, history.members, 1.0)


@pytest.mark.parametrize("seed", range(30))
def test_what_cannot_follow_is_refused_and_changes_nothing(seed: int) -> None:
    history = Run(seed).go(40)
    ledger = ledger_of(history.records)
    for record in impossible(history):
        with pytest.raises(JournalError):
            ledger.apply(record)
    assert InFlight(ledger.in_flight()) == history.in_flight()
    assert (ledger.version, ledger.incarnation, ledger.chain) == (history.version, 0, history.chain)
    history.go(20)
    for record in history.records[40:]:
        ledger.apply(record)


def test_training_a_second_time_has_an_error_of_its_own() -> None:
    ready = [Drawn(0, 0, 2), *(Generated(0, 0, ((m, 0, 0, 1),)) for m in (0, 1)), Scored(0, 0, 1.0), Scored(0, 1, 0.0)]
    for members in ((0,), (0, 1)):
        ledger = ledger_of([*ready, Trained(1, ((0, members),), (0.0,), "")])
        with pytest.raises(TrainedTwice, match="trained or dropped before"):
            ledger.apply(Trained(2, ((0, (0,)),), (0.0,), ""))
    with pytest.raises(IllegalTransition, match="never drawn"):
        ledger_of(ready).apply(Trained(1, ((7, (0,)),), (0.0,), ""))


def test_a_group_is_compared_once_and_a_resumed_run_knows_with_what() -> None:
    ledger = ledger_of([Drawn(0, 0, 2), Compared(0, 0.25), AttemptStarted(0, 1, (0, 1), "its worker died")])
    with pytest.raises(IllegalTransition, match="greedy answer had its reward before"):
        ledger.apply(Compared(0, 0.5))
    assert [group.greedy for group in ledger.groups.values()] == [0.25]


def test_memory_holds_groups_in_flight_only() -> None:
    history = Run(5).go(3000)
    ledger = ledger_of(history.records)
    assert len(ledger.groups) == len(history.in_flight().groups) < len(history.newest)


# ---- mutants -------------------------------------------------------------------------------------------------


def stages(ledger: Ledger, group: int, members: Any) -> list[Stage]:
    samples = ledger.groups[group].samples if group in ledger.groups else []
    return [samples[member].stage for member in members if member < len(samples)]


def trains(stage: Stage) -> Callable[[Ledger, Trained], bool]:
    return lambda ledger, record: any(stage in stages(ledger, *cut) for cut in record.cuts)


def is_of_an_old_attempt(ledger: Ledger, record: Generated) -> bool:
    samples = ledger.groups[record.group].samples if record.group in ledger.groups else []
    return any(samples[m].attempt > record.attempt for m, *_ in record.samples if m < len(samples))


def repeats_an_attempt(ledger: Ledger, record: AttemptStarted) -> bool:
    return record.group in ledger.groups and record.number == ledger.groups[record.group].attempt


LENIENT: dict[str, tuple[type[Any], Callable[[Ledger, Any], bool]]] = {
    "DoubleTrainAccepted": (Trained, trains(Stage.TRAINED)),
    "TrainsWithoutReward": (Trained, trains(Stage.SCORING)),
    "TrainsTheDropped": (Trained, trains(Stage.DROPPED)),
    "VersionMaySkip": (Trained, lambda ledger, record: record.version > ledger.version + 1),
    "StaleAttemptTaken": (Generated, is_of_an_old_attempt),
    "AttemptMayRepeat": (AttemptStarted, repeats_an_attempt),
    "IdMaySkip": (Drawn, lambda ledger, record: record.group > ledger.next_group),
    "DrawnTwice": (Drawn, lambda ledger, record: record.group < ledger.next_group),
    "DropsTheTrained": (Dropped, lambda ledger, r: {*stages(ledger, r.group, r.members)} == {Stage.TRAINED}),
    "ScoredTwice": (Scored, lambda ledger, record: Stage.READY in stages(ledger, record.group, [record.member])),
    "InFlightListBelieved": (InFlight, lambda ledger, record: True),
    "IncarnationMayStay": (Resumed, lambda ledger, record: record.incarnation == ledger.incarnation),
}
"""Each takes, and forgets, the records of one kind that should be refused under a condition."""


def lenient(kind: type[Any], passes: Callable[[Ledger, Any], bool]) -> type[Ledger]:
    class Lenient(Ledger):
        def apply(self, record: Record) -> None:
            if not isinstance(record, kind) or not passes(self, record):
                super().apply(record)

    return Lenient


class LosesTheDropped(Ledger):
    def apply(self, record: Record) -> None:
        super().apply(record)
        self.dropped.clear()


class ForgetsNothing(Ledger):
    def _forget(self, group: int) -> None:
        pass


MUTANTS = {name: lenient(*how) for name, how in LENIENT.items()}


@pytest.mark.parametrize(
    "mutant", [*MUTANTS.values(), LosesTheDropped, ForgetsNothing], ids=[*MUTANTS, "loses", "keeps"]
)
def test_a_broken_ledger_is_found(mutant: type[Ledger]) -> None:
    assert any(misbehaves(Run(seed).go(40), mutant) for seed in range(SEEDS))


def misbehaves(history: Run, mutant: type[Ledger]) -> bool:
    """Whether the mutant takes what it must not, or its account of a legal history is wrong."""
    ledger = ledger_of(history.records, mutant)
    account_holds = InFlight(ledger.in_flight()) == history.in_flight() and ledger.balanced()
    return not account_holds or any(takes(ledger, record) for record in impossible(history))


def takes(ledger: Ledger, record: Record) -> bool:
    try:
        ledger.apply(record)
    except JournalError:
        return False
    return True


# ---- the journal ---------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(seed=st.integers(0, 10**9), kept=st.floats(0, 1), tail=st.binary(max_size=20))
def test_a_torn_tail_is_cut_and_nothing_else(seed: int, kept: float, tail: bytes) -> None:
    history = Run(seed).go(30)
    store = MemoryStore()
    ends = [0]
    journal = Journal(store)
    for record in history.records:
        journal.append(record)
        ends.append(journal.offset)
    left = int(kept * store.size)
    found = Journal(store.after_power_cut(left, tail if left in ends else b""))
    whole = max(end for end in ends if end <= left)
    assert found.offset == found.store.size == whole
    assert found.torn == left - whole + (len(tail) if left in ends else 0)
    assert found.ledger.in_flight() == ledger_of(history.records[: ends.index(whole)]).in_flight()


def test_resuming_voids_what_follows_and_begins_new_attempts() -> None:
    journal = Journal(MemoryStore())
    history = Run(3).go(40)
    for record in history.records[:25]:
        journal.append(record)
    offset = journal.offset
    before = Scan(journal.store).replay(offset)
    for record in history.records[25:]:
        journal.append(record)
    journal.resume(incarnation=1, offset=offset)
    ledger = journal.ledger
    assert (ledger.in_flight(), ledger.version) == (before.in_flight(), before.version)
    assert (ledger.incarnation, ledger.next_group) == (1, before.next_group)
    assert {group.id: group.attempt + 1 for group in before.groups.values()} == {
        group.id: group.attempt for group in ledger.groups.values()
    }
    journal.append(Drawn(before.next_group, before.version, 3))
    again = Scan(journal.store).replay()
    assert (again.in_flight(), again.next_group) == (ledger.in_flight(), before.next_group + 1)
    assert again.incarnation == 1


def test_a_run_may_be_resumed_from_the_same_place_and_from_an_earlier_one() -> None:
    journal = Journal(MemoryStore())
    journal.append(Drawn(0, 0, 2))
    early = journal.offset
    journal.append(Drawn(1, 0, 2))
    late = journal.offset
    for incarnation, offset in ((1, late), (2, late), (3, early)):
        journal.append(Drawn(journal.ledger.next_group, 0, 2))
        journal.resume(incarnation, offset)
        assert Scan(journal.store).replay().in_flight() == journal.ledger.in_flight()
    assert journal.ledger.next_group == 1
    size = journal.store.size
    with pytest.raises(JournalError, match="had become void"):
        journal.resume(4, late)
    assert journal.store.size == size


def test_what_the_ledger_refuses_is_not_written() -> None:
    journal = Journal(MemoryStore())
    with pytest.raises(IllegalTransition, match="group 4 was drawn; the next one is 0"):
        journal.append(Drawn(4, 0, 2))
    assert journal.offset == journal.store.size == 0


def test_a_trainer_that_trained_something_else_is_found_at_once() -> None:
    journal = Journal(MemoryStore())
    history = Run(1)
    while not isinstance(history.step(), Trained):
        journal.append(history.records[-1])
    trained: Any = history.records[-1]
    with pytest.raises(JournalError, match="the trainer did not train what the journal says for version 1"):
        journal.append(Trained(trained.version, trained.cuts, trained.advantages, "0" * 64))
    ledger = journal.ledger
    assert (ledger.version, ledger.trained, journal.store.size) == (0, 0, journal.offset)
    journal.append(trained)
    assert ledger.version == 1
