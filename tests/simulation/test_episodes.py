"""Whole fleets play episodes while workers of all services die in the middle of them."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.fleet.service_calls import Handle
from asyncrl.simulation.faults.simulate_command import outcome_of
from asyncrl.simulation.faults.trial_execution import TrialRun, run_trial
from asyncrl.simulation.faults.trial_plan import Fault, Trial, draw_episodes
from tests.named_seed import named_seed, starts

CORE = 50
SEEDS = 150
PART = 50
RESUMED = 25


def resumed_episodes(seed: int) -> Trial:
    """Draws a trial with episodes whose controller dies twice, after checkpoints at each step."""
    chance = random.Random(f"resumed {seed}")
    trial = draw_episodes(seed)
    deaths = [Fault("controller", int(10 ** chance.uniform(2.4, 3.1)), power=chance.random() < 0.5) for _ in range(2)]
    sizes: dict[str, Any] = {
        "limit": chance.randint(1, 3),
        "groups": 2,
        "members": 3,
        "slots": 6,
        "steps": 4,
        "turns": 4,
    }
    return replace(trial, checkpoint_every=1, faults=(*trial.faults[:2], *deaths), **sizes)


@pytest.mark.parametrize("start", starts(CORE, SEEDS, PART))
def test_nothing_of_an_episode_is_lost_or_trained_twice(start: int) -> None:
    seen = Counter[str]()
    for seed in range(start, start + PART):
        with named_seed(seed):
            outcome = run_trial(draw_episodes(seed))
        seen.update(f"{fault.kind} {fault.target}" for fault in outcome.faults.injected)
        seen["restarted"] += outcome.restarted
    assert seen["kill environment"] > 10
    assert seen["kill generation"] > 3
    assert seen["restarted"] > PART


def test_episodes_go_on_after_the_controller_dies() -> None:
    """Episodes in the checkpoint begin at their last turn: no token is over the limit, none trains twice."""
    continued = 0
    policies = set[str]()
    for seed in range(RESUMED):
        trial = resumed_episodes(seed)
        with named_seed(seed):
            outcome = run_trial(trial)
        continued += outcome.truth.continued
        policies |= {trial.policy} if outcome.truth.continued else set()
    assert continued > RESUMED / 4
    assert policies == {"mask", "drop", "block", "admit"}


def test_the_same_seed_plays_the_same_episodes() -> None:
    assert run_trial(draw_episodes(3)).digest == run_trial(draw_episodes(3)).digest


# Hosts are fault domains: their losses blame no group, and hold nothing up for long.
NODES = {"generators": 16, "scorers": 8, "hosts": 8, "groups": 16, "members": 4, "slots": 2, "tokens": 250}
"""Two generators and a judge on each of eight nodes; a sample takes 25 s."""


def time_of(outcome: TrialRun) -> float:
    return outcome.faults.loop.time()


def test_a_lost_node_blames_and_isolates_no_group() -> None:
    outcome = run_trial(Trial(**NODES, steps=6, faults=(Fault("host", 1500, "generation"),)))
    assert outcome.restarted > 3
    assert (outcome.poisoned, outcome.most_isolated) == ([], 0)


def test_a_node_that_is_preempted_once_a_minute_blames_no_group_and_holds_nothing_up() -> None:
    plain = Trial(**NODES, steps=32, remote=True)
    preempted = run_trial(replace(plain, preemptions=30))
    assert preempted.preempted >= 10
    assert preempted.restarted > 50
    assert preempted.poisoned == []
    assert time_of(preempted) < 1.35 * time_of(run_trial(plain))


@pytest.mark.parametrize("poison", [(3,), (1, 3, 8), (0, 1, 2, 3)])
def test_poisonous_groups_are_found_within_five_deaths_each_while_nodes_are_lost(poison: tuple[int, ...]) -> None:
    outcome = run_trial(Trial(**NODES, steps=12, poison=poison, preemptions=30))
    assert sorted(outcome.poisoned) == list(poison)
    assert max(outcome.truth.crashes.values()) <= 5


# ---- mutants that the trials must find -------------------------------------------------------------------

POISONED = Trial(poison=(1,), generators=2, groups=2, steps=8)


def nobody_runs_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Handle, "_isolated", lambda handle, args: None)


def test_a_poisonous_group_is_not_found_where_nobody_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_trial(POISONED).poisoned == [1]
    nobody_runs_alone(monkeypatch)
    assert outcome_without_errors(POISONED) != [1]


def outcome_without_errors(trial: Trial) -> list[int]:
    outcome = outcome_of(trial)
    return outcome.poisoned if isinstance(outcome, TrialRun) else []
