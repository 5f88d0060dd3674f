"""Whole simulated runs of ReMax's algorithm, with lost rows, deaths and greedy answers that cannot be scored."""

import pytest

from asyncrl.protocols.staleness import Policy
from tests.simulation.simulated_run import FaultRates, Scenario, SimulationResult, simulate

FAULTS = FaultRates(generation=150.0, reward=90.0, reference=120.0, row=40.0, controller=200.0, power=0.5)
SHAPE = {"groups": 3, "members": 3, "slots": 18, "limit": 2, "steps": 12, "greedy": True}


def reasons(found: list[SimulationResult]) -> set[str]:
    return {reason for result in found for reason in result.dropped.values()}


@pytest.mark.parametrize("policy", ["mask", "drop", "block", "admit"])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_with_greedy_answers_holds_what_every_run_holds(policy: Policy, seed: int) -> None:
    """Staleness, conservation, the audit's witnesses, the same baselines in gate and journal, and no row is left."""
    cut_at = 1 if policy == "mask" else None
    scenario = Scenario(policy=policy, seed=seed, reference=0.5, cut_at=cut_at, faults=FAULTS, **SHAPE)
    result = simulate(scenario)
    assert result.version == 12
    assert result.digest == simulate(scenario).digest
    assert all(member >= 0 for _, member in (*result.lengths, *result.live, *result.dropped))


def test_a_group_whose_greedy_answer_has_no_reward_leaves_with_that_reason() -> None:
    found = [simulate(Scenario(seed=seed, unscorable=0.2, cut_at=2, finish="drain", **SHAPE)) for seed in range(3)]
    assert reasons(found) == {"greedy_unscorable", "unscorable", "stale"}
    assert all(result.version >= 12 for result in found)


def test_rows_that_are_lost_hurt_and_are_overcome() -> None:
    found = [simulate(Scenario(seed=seed, faults=FaultRates(row=5.0), cut_at=2, **SHAPE)) for seed in range(3)]
    assert sum(result.attempts_failed for result in found) > 0
    assert all(result.version == 12 for result in found)
