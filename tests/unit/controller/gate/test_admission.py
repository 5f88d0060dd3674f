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


def left(*samples: int) -> list[tuple[Pick, int]]:
    return [(BATCH, each) for each in samples]


@pytest.mark.parametrize(
    ("answers", "bound"),
    [
        ([(WAIT, 5), (WAIT, 1)], 16 + 3),  # A wait of the trainer raises it once by what was missing.
        ([(WAIT, 5), (WAIT, 1), (BATCH, 0), (WAIT, 0)], 19 + 8),
        ([(WAIT, 5), (DROPPED, 2)], 16 + 3 + 6),  # What was waited for and dropped raises it again.
        ([(WAIT, 9)], 16),  # A wait for a deadline with a whole batch does not.
        (left(*[6] * (WINDOW - 1)), 16),
        (left(*[6] * WINDOW), 13),  # It falls by half of what every batch of a window left,
        (left(*(6, 10) * (WINDOW // 2)), 16 - 2),  # and keeps more where batches come unevenly.
        ([*left(*[60] * (WINDOW - 1)), (WAIT, 7), *left(*[60] * WINDOW)], 17),  # A late batch begins the window again.
        ([*left(*[60] * (WINDOW - 1)), (WAIT, 7), *left(*[60] * (WINDOW + 1))], 8),  # It never falls below a batch.
    ],
)
def test_it_follows_what_the_trainer_found(answers: list[tuple[Pick, int]], bound: int) -> None:
    made = admission()
    for pick, offered in answers:
        made.observe(pick, offered)
    assert made.bound == bound


def test_full_admission_stays_at_the_credits() -> None:
    made = admission(admission="full")
    for _ in range(2 * WINDOW):
        made.observe(BATCH, 60)
    assert made.bound == 9 * 8
