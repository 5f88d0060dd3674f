"""Admission by feedback, answer by answer of the gate."""

from typing import Any

import pytest

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.gate.admission import WINDOW, Admission
from asyncrl.controller.gate.group_state import Drop, GroupState, Pick

WAIT = Pick(None)
BATCH = Pick(((0, (0, 1)),))
DROPPED = Pick(None, (Drop(GroupState(0, 0, []), (0, 1), "no_signal"),))


def admission(limit: int = 8, slots: int = 8, **changes: Any) -> Admission:
    options = {"admission": "adaptive", **changes}
    return Admission(GateConfig(groups=4, members=2, limit=limit, policy="mask", slots=slots, **options))


@pytest.mark.parametrize(("slots", "first"), [(1, 16), (8, 16), (12, 20), (40, 48), (500, 72)])
def test_it_starts_at_a_batch_and_the_slots_and_at_least_at_two_batches(slots: int, first: int) -> None:
    assert admission(slots=slots).bound == first


@pytest.mark.parametrize(("limit", "credits"), [(0, 8), (1, 16), (2, 24)])
def test_it_never_exceeds_the_credits_of_the_gate(limit: int, credits: int) -> None:
    made = admission(limit, slots=500)
    assert made.bound == credits
    made.observe(DROPPED, 0)
    made.observe(DROPPED, 0)
    assert made.bound == credits


def test_it_draws_below_the_bound_only() -> None:
    made = admission()
    assert made.allows(made.bound - 1)
    assert not made.allows(made.bound)


def test_a_wait_of_the_trainer_raises_it_once_by_what_was_missing() -> None:
    made = admission()
    made.observe(WAIT, 5)
    made.observe(WAIT, 1)
    assert made.bound == 16 + 3
    made.observe(BATCH, 0)
    made.observe(WAIT, 0)
    assert made.bound == 19 + 8


def test_what_was_waited_for_and_dropped_raises_it_again() -> None:
    made = admission()
    made.observe(WAIT, 5)
    made.observe(DROPPED, 2)
    assert made.bound == 16 + 3 + 6


def test_a_wait_for_a_deadline_with_a_whole_batch_does_not_raise_it() -> None:
    made = admission()
    made.observe(WAIT, 9)
    assert made.bound == 16


def test_it_falls_by_half_of_what_every_batch_of_a_window_left() -> None:
    made = admission()
    for _ in range(WINDOW - 1):
        made.observe(BATCH, 6)
    assert made.bound == 16
    made.observe(BATCH, 6)
    assert made.bound == 13


def test_it_keeps_more_where_batches_come_unevenly() -> None:
    made = admission()
    for left in (6, 10) * (WINDOW // 2):
        made.observe(BATCH, left)
    assert made.bound == 16 - 2


def test_a_late_batch_begins_the_window_again_and_it_never_falls_below_a_batch() -> None:
    made = admission()
    for _ in range(WINDOW - 1):
        made.observe(BATCH, 60)
    made.observe(WAIT, 7)
    made.observe(BATCH, 60)
    for _ in range(WINDOW - 1):
        made.observe(BATCH, 60)
    assert made.bound == 17
    made.observe(BATCH, 60)
    assert made.bound == 8


def test_full_admission_stays_at_the_credits() -> None:
    made = admission(admission="full")
    for _ in range(2 * WINDOW):
        made.observe(BATCH, 60)
    assert made.bound == 9 * 8
