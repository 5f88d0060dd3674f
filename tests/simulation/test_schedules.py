"""Whole runs on virtual time, with everything random: the invariants hold, and every seed can be replayed."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from asyncrl.protocols.staleness import Policy
from tests.named_seed import named_seed
from tests.simulation.simulated_run import FaultRates, Scenario, simulate

SEEDS = 100
Draw = Callable[[int], Scenario]


def test_random_schedules_hold_every_invariant(random_scenario: Draw) -> None:
    seen = Counter[str]()
    for seed in range(SEEDS):
        scenario = random_scenario(seed)
        with named_seed(seed, f" in {scenario}"):
            result = simulate(scenario)
        assert result.version >= scenario.steps, f"seed {seed} stopped at version {result.version}"
        seen.update(result.dropped.values())
        seen.update(attempts_failed=result.attempts_failed, steps_lost=result.steps_lost, deaths=result.deaths)
        seen.update({scenario.policy: 1})
    rare = {what: seen[what] for what in EXPECTED if seen[what] < 10}
    assert not rare, f"too seldom to have been tested: {rare}"
    assert not seen["poison"], "workers die of other things here"


EXPECTED = (
    *("mask", "drop", "block", "admit"),
    *("stale", "unscorable", "no_baseline", "no_signal", "not finite", "attempts_failed", "steps_lost", "deaths"),
)


@pytest.mark.parametrize("seed", [1, 10, 23])
def test_the_same_seed_gives_the_same_history(random_scenario: Draw, seed: int) -> None:
    assert simulate(random_scenario(seed)).digest == simulate(random_scenario(seed)).digest


def test_another_seed_gives_another_history() -> None:
    assert simulate(Scenario(steps=3, seed=1)).digest != simulate(Scenario(steps=3, seed=2)).digest


def test_the_history_is_the_same_in_another_process() -> None:
    code = (
        "from tests.simulation.simulated_run import *; from tests.simulation.simulated_run import *; "
        "print(simulate(Scenario(steps=3, seed=7, faults=FaultRates(generation=20, reward=20))).digest)"
    )
    python = [sys.executable, "-c", code]
    elsewhere = subprocess.run(python, capture_output=True, text=True, check=True, timeout=60)
    here = simulate(Scenario(steps=3, seed=7, faults=FaultRates(generation=20, reward=20))).digest
    assert elsewhere.stdout.strip() == here


def test_without_staleness_every_batch_is_the_groups_drawn_for_it() -> None:
    base = Scenario(limit=0, groups=3, members=4, slots=12, steps=5, policy="drop")
    trained = simulate(base).live
    assert list(trained) == [(group, member) for group in range(15) for member in range(4)]


@pytest.mark.trap("short_first")
def test_draining_trains_all_that_was_drawn() -> None:
    scenario = Scenario(policy="admit", groups=2, members=4, slots=16, steps=4, finish="drain")
    drained = simulate(scenario)
    abandoned = simulate(replace(scenario, finish="abandon"))
    assert abandoned.version == 4
    assert drained.version > 4
    assert len(drained.live) > len(abandoned.live)
    assert set(drained.live) == set(drained.lengths)


# Whole simulated runs of PPO's algorithm and that of Safe RLHF, with lost rows and deaths.
FAULTS = FaultRates(generation=150.0, reward=90.0, reference=120.0, row=40.0, controller=200.0, power=0.5)


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("policy", ["mask", "drop", "block", "admit"])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_with_critics_holds_what_every_run_holds(policy: Policy, seed: int, constrained: bool) -> None:
    """Staleness, conservation, the audit's witnesses, and no row is left: `simulate` checks them."""
    shape = {"groups": 3, "members": 3, "slots": 18, "limit": 2, "steps": 12, "cut_at": 2 if policy == "mask" else None}
    critics = {"critic": 0.7, "constrained": constrained, "unscorable": 0.02 if constrained else 0.0}
    scenario = Scenario(policy=policy, seed=seed, reference=0.5, faults=FAULTS, **critics, **shape)
    result = simulate(scenario)
    assert result.version == 12
    assert result.digest == simulate(scenario).digest


def test_rows_that_are_lost_hurt_and_are_overcome() -> None:
    found = [simulate(Scenario(seed=seed, critic=0.7, faults=FaultRates(row=5.0), steps=8)) for seed in range(3)]
    assert sum(result.steps_lost for result in found) > 0
    assert all(result.version == 8 for result in found)
