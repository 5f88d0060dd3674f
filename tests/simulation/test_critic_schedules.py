"""Whole simulated runs of PPO's algorithm and that of Safe RLHF, with lost rows and deaths."""

import pytest

from asyncrl.protocols.staleness import Policy
from asyncrl.simulation.simulated_run import FaultRates, Scenario, simulate

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
