"""Deadlines count work and not queues, over real connections and handles on virtual time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.fleet.fleet import RunningFleet
from asyncrl.lanes.control.open_calls import Deadlines
from asyncrl.protocols.messages import PromptGroup
from asyncrl.simulation.fakes.fake_service import now
from asyncrl.simulation.fakes.generation import FakeGeneration
from asyncrl.simulation.faults.trial_execution import TrialRun, run_trial
from asyncrl.simulation.faults.trial_plan import Fault, Trial

FULL = {"groups": 32, "members": 8, "limit": 2, "cut_at": 4, "max_new_tokens": 100_000}


def unhurt(trial: Trial) -> TrialRun:
    """Runs a trial in which no attempt fails, no answer is cut short and no group is poisoned."""
    outcome = run_trial(trial)
    assert (outcome.restarted, outcome.truncated, outcome.poisoned) == (0, 0, [])
    assert outcome.version >= trial.steps
    return outcome


def test_samples_that_wait_long_for_a_slot_are_neither_failed_nor_cut() -> None:
    """776 samples in flight, 8 slots, 20 s a sample, a deadline of 600 s: the last one waits for half an hour."""
    trial = Trial(**FULL, slots=8, tokens=200, deadline=600.0, steps=4)
    assert trial.gate.cap * trial.members == 776
    assert trial.queue_time > 3 * trial.deadline
    unhurt(trial)


def test_slow_judges_are_waited_for() -> None:
    """Dozens of calls of 10 s each, and some of 40 s, wait for one judge, where a call has 60 s."""
    unhurt(Trial(groups=8, members=8, limit=2, slots=64, steps=1, reward_time=10.0, judges=1, tokens=20))


def test_a_sample_ends_by_its_own_deadline_and_no_sooner() -> None:
    outcome = run_trial(Trial(groups=2, members=4, slots=2, tokens=100, deadline=9.0, steps=2))
    assert outcome.truncated >= 16
    outcome = unhurt(Trial(groups=2, members=4, slots=2, tokens=100, deadline=10.1, steps=2, max_new_tokens=1000))


@pytest.mark.parametrize("service", ["generation", "reward"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_worker_that_hangs_is_replaced_and_no_group_is_blamed(service: str, replicas: int) -> None:
    hang = Fault("hang", 60, service)
    trial = Trial(groups=2, members=4, slots=2, steps=20, generators=replicas, scorers=replicas, faults=(hang,))
    outcome = run_trial(trial)
    assert [instance.startswith(service) for instance in outcome.truth.hung] == [True]
    assert not set(outcome.truth.hung) & set(outcome.truth.services)
    assert outcome.poisoned == []


# ---- what the tests above must find ----------------------------------------------------------------------


def queues_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Deadlines, "note_answer", lambda deadlines, number: None)


def a_stuck_worker_is_left_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningFleet, "_stuck", lambda *_: None)


def the_deadline_runs_from_the_call(patch: pytest.MonkeyPatch) -> None:
    def generate(service: FakeGeneration, prompts: PromptGroup) -> Any:
        called[prompts.id, prompts.attempt] = now()
        return generate_whole(service, prompts)

    def begin(service: FakeGeneration, sequence: Any) -> None:
        waited = now() - called[sequence.prompts.id, sequence.prompts.attempt]
        sequence.prompts = replace(sequence.prompts, deadline=max(0.1, sequence.prompts.deadline - waited))
        begin_whole(service, sequence)

    called: dict[tuple[int, int], float] = {}
    generate_whole = FakeGeneration.generate
    begin_whole = FakeGeneration._begin
    patch.setattr(FakeGeneration, "generate", generate)
    patch.setattr(FakeGeneration, "_begin", begin)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (queues_count, test_samples_that_wait_long_for_a_slot_are_neither_failed_nor_cut),
        (queues_count, test_slow_judges_are_waited_for),
        (the_deadline_runs_from_the_call, test_a_sample_ends_by_its_own_deadline_and_no_sooner),
    ],
)
def test_a_mutant_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test()


def test_a_worker_that_hangs_would_hold_its_groups_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    a_stuck_worker_is_left_alone(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_worker_that_hangs_is_replaced_and_no_group_is_blamed("generation", 1)
