"""Compares the staleness policies on the same simulated fleet.

Eight prompts a step, eight samples of each, 192 slots, limit 2; one completion in twenty is ten times as long as the
others. The slots sample a batch in 4.8 s and the trainer takes as long for one, so that either waits for the other only
because of the policy. `whole groups` is `mask` that never trains a part of a group.
"""

from dataclasses import dataclass, replace
from statistics import mean

import pytest

from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import OPEN, GroupState
from asyncrl.simulation.fakes.generation import stragglers
from asyncrl.simulation.fakes.training import StepCost
from tests.simulation.simulated_run import Scenario, simulate

STEPS = 20
SEEDS = 5
SHORT = 100
TIMES = 10
SLOW = SHORT * TIMES


class WholeGroups(Gate):
    """Never trains a part of a group."""

    def may_cut(self, group: GroupState) -> bool:
        return not group.members(*OPEN)


BASE = Scenario(lengths=stragglers(SHORT, 0.05, TIMES), cost=StepCost(4.8), thorough=False, steps=STEPS)
POLICIES = {
    "admit": replace(BASE, policy="admit"),
    "drop": replace(BASE, policy="drop"),
    "mask, whole groups": replace(BASE, policy="mask", gate_class=WholeGroups),
    "mask, cuts": replace(BASE, policy="mask", cut_at=4),
}


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Holds means over seeds; shares lie between 0 and 1.

    live: trained tokens within the limit, per second. over: share of the trained tokens that are over the limit.
    idle: share of the trainer's time without a batch. masked: share of samples that left without a live token.
    slow: share of the long completions that trained.
    """

    live: float
    over: float
    idle: float
    masked: float
    slow: float


def outcome(scenario: Scenario) -> PolicyResult:
    results = [simulate(replace(scenario, seed=seed)) for seed in range(SEEDS)]

    # Live tokens of the samples that were trained or dropped, by seed, and of the long ones among them.
    ended = [{**dict.fromkeys(result.dropped, 0), **result.live} for result in results]
    slow = [
        [tokens for key, tokens in tokens_of.items() if result.lengths.get(key, 0) == SLOW]
        for tokens_of, result in zip(ended, results, strict=True)
    ]
    return PolicyResult(
        live=mean(result.live_tokens / result.seconds for result in results),
        over=mean(1 - result.live_tokens / result.in_loss for result in results),
        idle=mean(result.idle for result in results),
        masked=mean(mean(tokens == 0 for tokens in tokens_of.values()) for tokens_of in ended),
        slow=mean(mean(tokens > 0 for tokens in of_seed) for of_seed in slow),
    )


@pytest.fixture(scope="module")
def policies() -> dict[str, PolicyResult]:
    return {name: outcome(scenario) for name, scenario in POLICIES.items()}


def test_cuts_train_far_more_live_tokens_than_dropping(policies: dict[str, PolicyResult]) -> None:
    assert policies["mask, cuts"].live >= 1.5 * policies["drop"].live


def test_cuts_train_no_fewer_live_tokens_than_admitting_all(policies: dict[str, PolicyResult]) -> None:
    assert policies["mask, cuts"].live >= policies["admit"].live


def test_cuts_leave_the_trainer_less_idle_than_admitting_all(policies: dict[str, PolicyResult]) -> None:
    assert policies["mask, cuts"].idle < policies["admit"].idle


def test_hardly_a_sample_is_masked_whole(policies: dict[str, PolicyResult]) -> None:
    assert policies["mask, cuts"].masked < 0.02


def test_slow_samples_train(policies: dict[str, PolicyResult]) -> None:
    assert policies["mask, cuts"].slow > 0.99


def test_waiting_for_whole_groups_expires_the_siblings_of_slow_samples(policies: dict[str, PolicyResult]) -> None:
    whole = policies["mask, whole groups"]
    cuts = policies["mask, cuts"]
    assert whole.masked > 0.15
    assert whole.live < 0.75 * cuts.live
    assert whole.idle > 1.5 * cuts.idle


def test_only_admitting_all_trains_tokens_over_the_limit(policies: dict[str, PolicyResult]) -> None:
    assert policies["admit"].over > 0.2
    assert all(policies[name].over == 0 for name in POLICIES if name != "admit")
