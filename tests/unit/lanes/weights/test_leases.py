"""Leases: no interleaving of readers and writer overwrites what a reader reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import Refused
from asyncrl.lanes.weights.leases import Leases, must_flip, slot_of
from asyncrl.protocols.messages import Published


def published(version: int, incarnation: int = 0) -> Published:
    return Published(incarnation, version, "inproc://arena", slot_of(version), "")


@given(st.lists(st.tuples(st.sampled_from(["write", "join", "flip", "kill"]), st.integers(0, 2)), max_size=60))
def test_no_schedule_overwrites_what_is_read(schedule: list[tuple[str, int]]) -> None:
    leases = Leases()
    leases.end_write(0)
    newest = 0
    reading = {}
    for action, number in schedule:
        reader = f"reader{number}"
        if action == "write" and not leases.holders(newest + 1):
            leases.begin_write(newest + 1)
            assert all(slot_of(version) != slot_of(newest + 1) for version in reading.values())
            leases.end_write(newest + 1)
            newest += 1
        elif action == "kill":
            leases.detach(reader)
            reading.pop(reader, None)
        elif action == "join" or (action == "flip" and reader in reading):
            leases.using(reader, newest)
            reading[reader] = newest
        assert set(reading.values()) <= set(leases.versions)
    held = {reader for reader, version in reading.items() if version != newest}
    assert set(leases.holders(newest + 1)) == held


def test_a_holder_is_named_until_it_flips_and_late_repetitions_change_nothing() -> None:
    leases = Leases()
    leases.end_write(4)
    leases.using("a", 4)
    leases.using("b", 4)
    leases.end_write(5)
    leases.using("b", 5)
    leases.using("b", 4)
    assert leases.holders(6) == ["a"]
    leases.using("a", 5)
    assert leases.holders(6) == []


def test_joining_at_a_version_that_is_gone_is_refused() -> None:
    leases = Leases()
    for version in range(3):
        leases.begin_write(version)
        leases.end_write(version)
    with pytest.raises(Refused, match="version 0; the arena holds \\[1, 2\\]"):
        leases.using("late", 0)


def test_reader_jumps_to_the_newest_and_never_back() -> None:
    assert must_flip(None, published(3))
    assert must_flip(published(3), published(6))
    assert not must_flip(published(3), published(3))
    assert not must_flip(published(3), published(2))
    with pytest.raises(Refused, match="incarnation 1 were offered to a reader of incarnation 0"):
        must_flip(published(3), published(4, incarnation=1))
