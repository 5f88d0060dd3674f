"""Fleets whose workers join from other machines hold every invariant while those come, leave, die and are cut off."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.simulation.faults.trial_execution import TrialRun, run_trial
from asyncrl.simulation.faults.trial_plan import (
    BASE,
    ENOUGH,
    MEMBERSHIP,
    Fault,
    Kind,
    Trial,
    draw_joined,
    draw_joined_returns,
)
from tests.named_seed import named_seed, starts

CORE = 50
SEEDS = 100
PART = 50
RETURNS = 20
FLEET = Trial(joined=True, remote=True, hosts=3, generators=2, groups=2, members=3, steps=12, tokens=30)
"""Two generators and a scorer on three machines; the third one is a spare for both, and a sample takes 3 s."""


def time_of(outcome: TrialRun) -> float:
    return outcome.faults.loop.time()


@pytest.mark.parametrize("start", starts(CORE, SEEDS, PART))
def test_random_trials_with_machines_hold_every_invariant(start: int) -> None:
    seen = Counter[str]()
    for seed in range(start, start + PART):
        with named_seed(seed, f". Shrink it: scripts/simulate --hosts --start {seed}"):
            outcome = run_trial(draw_joined(seed))
        seen.update(fault.kind for fault in outcome.faults.injected)
        seen["restarted"] += outcome.restarted
    rare = {what: seen[what] for what in (*MEMBERSHIP, "restarted") if seen[what] < 5}
    assert not rare, f"these happened too seldom to count as tested: {rare}"


def test_random_deaths_of_the_trainer_among_machines_hold_every_invariant() -> None:
    returned = 0
    for seed in range(RETURNS):
        with named_seed(seed):
            outcome = run_trial(draw_joined_returns(seed))
        assert outcome.ends[-1] == "finished"
        returned += outcome.returns
    assert returned >= RETURNS, "workers on machines went on in another incarnation"


def test_the_same_seed_gives_the_same_history() -> None:
    assert run_trial(draw_joined(3)).digest == run_trial(draw_joined(3)).digest


@pytest.mark.parametrize("at", [200, 260, 320, 380])
@pytest.mark.parametrize("kind", ["host", "partition", "one-way"])
def test_a_machine_that_is_lost_costs_attempts_and_its_spare_goes_on(kind: Kind, at: int) -> None:
    fault = Fault(kind, at, "generation" if kind == "host" else "host0", seconds=600.0)
    outcome = run_trial(replace(FLEET, faults=(fault,)))
    assert outcome.ends == ["finished"]
    assert (outcome.poisoned, outcome.most_isolated) == ([], 0)
    assert time_of(outcome) < time_of(run_trial(FLEET)) + 30.0


@pytest.mark.parametrize("seconds", [1.0, 10.0])
def test_a_partition_that_ends_before_three_heartbeats_costs_no_attempt(seconds: float) -> None:
    """Heartbeats between controller and worker come every 4 s; those of joining every 2 s, so 10 s end the machine."""
    outcome = run_trial(replace(FLEET, faults=(Fault("partition", 300, "host0", seconds=seconds, peer=BASE),)))
    assert (outcome.restarted == 0) == (seconds < 6)


@pytest.mark.parametrize("at", [200, 260, 320, 380])
def test_a_machine_that_leaves_with_enough_time_loses_no_attempt(at: int) -> None:
    outcome = run_trial(replace(FLEET, faults=(Fault("leave", at, "host0", seconds=120.0),)))
    assert (outcome.restarted, outcome.ends) == (0, ["finished"])


def test_machines_that_leave_one_after_another_isolate_no_group() -> None:
    """The only group in flight loses each of its attempts, which nothing caused but the wish of its host."""
    leaves = tuple(Fault("leave", 150 + 60 * number, f"host{number}") for number in range(3))
    shape: dict[str, Any] = {"groups": 1, "limit": 0, "generators": 1, "tokens": 60, "steps": 6}
    outcome = run_trial(replace(FLEET, faults=leaves, **shape))
    assert outcome.restarted > 1
    assert (outcome.most_isolated, outcome.ends) == (0, ["finished"])


def test_a_machine_that_comes_late_takes_a_place_that_waits() -> None:
    more = Fault("scale", 150, "generation", count=4)
    late = Fault("join", 200, "generation")
    assert run_trial(replace(FLEET, steps=20, faults=(more,))).alive["generation"] == 3
    assert run_trial(replace(FLEET, steps=20, faults=(more, late))).alive["generation"] == 4


@pytest.mark.parametrize("counts", [(3,), (1,), (3, 1, 2), (1, 3, 1)])
def test_as_many_workers_run_as_were_asked_for_and_no_attempt_is_lost(counts: tuple[int, ...]) -> None:
    faults = tuple(Fault("scale", 170 + 100 * number, "generation", count=count) for number, count in enumerate(counts))
    outcome = run_trial(replace(FLEET, steps=20, faults=faults))
    assert outcome.restarted == 0
    assert outcome.alive["generation"] == counts[-1]


@pytest.mark.parametrize("kind", ["partition", "one-way"])
def test_machines_that_cannot_reach_each_other_blame_no_group(kind: Kind) -> None:
    """The only scorer cannot read what one of two generators makes, whose groups begin again until they come to the
    other one."""
    ends = ("host0", "host1") if kind == "partition" else ("host1", "host0")
    cut = Fault(kind, 154, ends[0], seconds=150.0, peer=ends[1])
    outcome = run_trial(replace(FLEET, hosts=2, slots=2, steps=16, faults=(cut,)))
    assert (outcome.poisoned, outcome.most_isolated, outcome.ends) == ([], 0, ["finished"])
    assert any("cannot reach" in text and "Look at the network" in text for text in outcome.warnings)


def test_a_worker_whose_start_was_not_reported_is_started_elsewhere_under_another_name() -> None:
    """The first machine starts it, and its report does not arrive: names of instances are used once."""
    silent = Fault("one-way", 200, "host2", seconds=60.0, peer=BASE)
    more = Fault("scale", 201, "generation", count=3)
    outcome = run_trial(replace(FLEET, hosts=4, steps=20, faults=(silent, more)))
    assert outcome.alive["generation"] == 3


def test_a_machine_that_was_given_up_while_it_fetched_files_joins_again() -> None:
    """Its messages come late, 10 s after it seemed to be gone; a refusal would have ended it for good."""
    smallest: dict[str, Any] = {"groups": 1, "limit": 0, "slots": 1, "cut_at": None, "steps": 1, "reward_time": 0.0}
    silent = Fault("one-way", 37, "host1", seconds=10.0)
    trial = Trial(**smallest, generators=3, hosts=3, remote=True, latency=0.001, faults=(silent,), joined=True)
    assert run_trial(replace(trial, seed=50985)).ends == ["finished"]


def test_a_worker_of_a_host_that_leaves_while_the_run_still_starts_gets_no_work() -> None:
    """Its host leaves while another generator is still missing; the worker ignores a request to stop."""
    smallest: dict[str, Any] = {"groups": 1, "limit": 0, "slots": 1, "cut_at": None, "steps": 3, "reward_time": 0.0}
    leaves = (Fault("leave", 58, "host1", seconds=ENOUGH), Fault("leave", 616, "host0", seconds=ENOUGH))
    trial = Trial(**smallest, shape="bimodal", step_time=2.0, tokens=44, finish="drain", joined=True, remote=True)
    outcome = run_trial(replace(trial, seed=1839, generators=3, scorers=2, hosts=3, faults=leaves))
    assert outcome.restarted == 0


def test_an_answer_that_loses_its_rows_after_its_group_was_finished_is_no_error() -> None:
    """The greedy answer of a group may still be under way when all else of it is dropped."""
    outcome = run_trial(draw_joined(27022))
    assert outcome.version >= outcome.trial.steps


def test_spot_machines_add_to_what_was_scaled_and_their_loss_blames_nobody() -> None:
    spot = Fault("spot", 150, "generation", seconds=15.0)
    more = Fault("scale", 140, "generation", count=4)
    outcome = run_trial(replace(FLEET, steps=30, groups=4, slots=1, faults=(more, spot)))
    alone = run_trial(replace(FLEET, steps=30, groups=4, slots=1))
    assert (outcome.poisoned, outcome.ends) == ([], ["finished"])
    assert time_of(outcome) < time_of(alone)
