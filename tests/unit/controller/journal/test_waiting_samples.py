"""Records of a sample that waits for training: it is trained once, and after a resume restored or sampled again."""

from typing import Any

import pytest

from asyncrl.controller.gate.group_state import Stage
from asyncrl.controller.journal.journal import Journal, Scan
from asyncrl.controller.journal.ledger import (
    AttemptStarted,
    Drawn,
    Dropped,
    Generated,
    Restored,
    Resumed,
    Scored,
    Trained,
)
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.errors import IllegalTransition, TrainedTwice
from asyncrl.protocols.hash_chain import GENESIS, chain


def waiting_for_training() -> Journal:
    """Returns a journal with a sample that waits for training, one that is scored and one that runs."""
    journal = Journal(MemoryStore())
    journal.append(Drawn(0, 0, 3))
    journal.append(Generated(0, 0, ((0, 0, 0, 5), (1, 0, 0, 5))))
    journal.append(Scored(0, 0, 1.0))
    return journal


def test_a_record_that_names_a_sample_twice_is_refused() -> None:
    journal = waiting_for_training()
    cuts = ((0, (0, 0)),)
    with pytest.raises(TrainedTwice, match="names it twice"):
        journal.append(Trained(1, cuts, (0.5, 0.5), chain(GENESIS, [(0, 0, 0)] * 2).hex()))
    assert journal.ledger.trained == 0


def test_a_restored_sample_goes_on_as_it_was_and_the_others_begin_again() -> None:
    journal = waiting_for_training()
    journal.resume(1, journal.offset, restored=((0, (0,)),))
    states = [(each.stage, each.attempt) for each in journal.ledger.groups[0].samples]
    assert states == [(Stage.READY, 0), (Stage.RUNNING, 1), (Stage.RUNNING, 1)]
    journal.append(Trained(1, ((0, (0,)),), (0.5,), chain(GENESIS, [(0, 0, 0)]).hex()))
    assert Scan(journal.store).replay().trained == 1


@pytest.mark.parametrize("record", [Generated(0, 0, ((2, 0, 0, 5),)), Scored(0, 1, 1.0), Dropped(0, (0,), "stale")])
def test_after_a_resume_no_sample_moves_before_it_was_restarted_or_restored(record: Any) -> None:
    ledger = waiting_for_training().ledger
    ledger.apply(Resumed(1, 0, 0))
    with pytest.raises(IllegalTransition, match="neither restarted nor restored since the resume"):
        ledger.apply(record)
    ledger.apply(Restored(((0, (0,)),)))
    ledger.apply(AttemptStarted(0, 1, (1, 2), "resumed"))
    ledger.apply(Dropped(0, (0,), "stale"))


RESUMED = Resumed(1, 0, 0)
WAITING = Restored(((0, (0,)),))


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([RESUMED, Restored(((0, (1,)),))], "it is scoring"),
        ([RESUMED, Restored(((0, (0,)), (1, (0,))))], "was never drawn"),
        ([RESUMED, AttemptStarted(0, 1, (0,), "resumed"), WAITING], "it is running"),
        ([RESUMED, WAITING, WAITING], "it began again, or no run did"),
        ([WAITING], "it began again, or no run did"),
    ],
)
def test_only_a_sample_that_waited_when_the_run_was_resumed_is_restored_and_once(records: list[Any], why: str) -> None:
    ledger = waiting_for_training().ledger
    for record in records[:-1]:
        ledger.apply(record)
    with pytest.raises(IllegalTransition, match=why):
        ledger.apply(records[-1])


def test_no_sample_is_restored_with_tokens_of_a_lost_future() -> None:
    ledger = waiting_for_training().ledger
    ledger.groups[0].samples[0].last = 1
    ledger.apply(Resumed(1, 0, 0))
    with pytest.raises(IllegalTransition, match="of version 1 cannot be restored at version 0"):
        ledger.apply(Restored(((0, (0,)),)))
