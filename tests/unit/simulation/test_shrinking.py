"""Shrinking: what has nothing to do with a failure goes away, what it needs stays."""

from asyncrl.simulation.faults.shrinking import candidates, shrink
from asyncrl.simulation.faults.trial_plan import Fault, Trial, draw_trial

CULPRIT = Fault("kill", 40, "training", turns=3)


def fails_after_a_death_of_the_trainer(trial: Trial) -> str:
    return "Wrong" if any(fault.target == "training" for fault in trial.faults) and trial.steps >= 2 else ""


def test_what_is_left_is_what_the_failure_needs() -> None:
    noise = tuple(fault for fault in draw_trial(7).faults if fault.target != "training")
    trial = Trial(seed=7, groups=2, members=3, steps=4, remote=True, latency=0.1, faults=(*noise, CULPRIT, *noise))
    small = shrink(trial, fails_after_a_death_of_the_trainer)
    assert small.faults == (Fault("kill", 40, "training"),)
    assert (small.steps, small.groups, small.members, small.remote, small.latency) == (2, 1, 2, False, 0.0)
    assert small.seed == 7


def test_a_trial_that_fails_in_another_way_is_not_what_is_looked_for() -> None:
    def fails(trial: Trial) -> str:
        return "Wrong" if trial.remote else "Deadlock"

    assert shrink(Trial(remote=True, latency=0.1), fails).remote


def test_every_candidate_is_simpler_in_one_way() -> None:
    trial = draw_trial(3)
    assert all(each != trial and each.seed == trial.seed for each in candidates(trial))
    assert list(candidates(shrink(trial, lambda _: "Wrong"))) == []
