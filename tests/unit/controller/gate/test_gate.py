"""The gate under random schedules, beside a world that keeps its own account; and its rules one by one."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import Config
from asyncrl.controller.gate.gate import Gate
from asyncrl.errors import IllegalTransition
from tests.unit.controller.gate.world import World


@settings(max_examples=120)
@given(st.integers(0, 10**9))
def test_rules_hold_on_random_schedules(seed: int) -> None:
    World(seed).run()


@settings(max_examples=50)
@given(st.integers(0, 10**9), st.sampled_from(["mask", "drop", "block", "admit"]))
def test_no_limit_to_staleness_of_zero_is_exactly_the_synchronous_batch(seed: int, policy: str) -> None:
    run = World(seed, limit=0, policy=policy, need_signal=False)
    run.losses = run.chaos = 0.0
    batch = run.config.groups * run.config.members
    run.run()
    assert run.gate.version == run.steps
    by_version = [[f for f in run.facts.values() if f.since == version] for version in range(run.steps)]
    assert [len(facts) for facts in by_version] == [batch] * run.steps
    assert all(fact.first == fact.last == fact.since for fact in run.facts.values())
    assert len(run.trained) == batch * run.steps


def one_group(members: int = 4, **changes: Any) -> Gate:
    gate = Gate(GateConfig(**{"groups": 1, "members": members, "limit": 1, "policy": "mask", "slots": 8, **changes}))
    gate.draw()
    return gate


def ready(gate: Gate, group: int, member: int, reward: float | None) -> None:
    assert gate.generated(group, member, 0, 0, 0, tokens=10)
    assert gate.scored(group, member, 0, reward)


def scored_group(*rewards: float | None, **changes: Any) -> Gate:
    gate = one_group(**changes)
    for member, reward in enumerate(rewards):
        ready(gate, 0, member, reward)
    return gate


def config_with(**sections: Any) -> GateConfig:
    return GateConfig.of(Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, **sections}))


@pytest.mark.parametrize(("written", "cut_at"), [(None, 4), ("never", None), (3, 3)])
def test_cut_at_defaults_to_half_a_group(written: Any, cut_at: int | None) -> None:
    assert config_with(staleness={"cut_at": written}).cut_at == cut_at


def test_the_slots_of_every_replica_count() -> None:
    assert config_with(generation={"slots": 24, "replicas": 3}).slots == 72


STAYS = ("stale", "truncated", "no_signal", "rejected", "not finite", "left out")


@pytest.mark.parametrize("reason", [*STAYS, "unscorable", "poison", "a reason of an algorithm"])
def test_the_reward_of_a_member_that_was_compared_stays_in_the_baseline_and_no_other(reason: str) -> None:
    gate = scored_group(0.0, 1.0, 2.0, 3.0)
    gate.drop(0, [3], reason)
    assert gate.group(0).rewards() == {0: 0.0, 1: 1.0, 2: 2.0, **({3: 3.0} if reason in STAYS else {})}


def test_in_flight_cap_counts_slots_under_mask_only() -> None:
    config = GateConfig(groups=8, members=8, limit=2, policy="mask", slots=190)
    assert (config.cap, config.credits) == (3 * 8 + 24, 3 * 64)
    assert replace(config, policy="drop").cap == 3 * 8


@pytest.mark.trap("unscorable")
def test_a_reward_dropped_as_stale_stays_in_the_baseline() -> None:
    gate = scored_group(1.0, 0.0, None, limit=0)
    gate.trained((), 1)
    assert [(drop.members, drop.reason) for drop in gate.pick().dropped] == [((0, 1), "stale")]
    assert gate.group(0).rewards() == {0: 1.0, 1: 0.0}


@pytest.mark.trap("group_of_one")
def test_a_complete_group_with_one_reward_has_no_baseline() -> None:
    gate = scored_group(1.0, None, members=2)
    assert [(drop.group.id, drop.members, drop.reason) for drop in gate.pick().dropped] == [(0, (0,), "no_baseline")]
    assert gate.finished(0)


def test_the_gap_of_an_early_cut_is_known_when_its_group_is_finished() -> None:
    gate = scored_group(1.0, 0.0, members=3, cut_at=2, slots=3)
    gate.drop(gate.draw(), range(3), "poison")
    assert gate.pick().cuts is None
    drawn = gate.draw()
    for member in range(2):
        ready(gate, drawn, member, 0.0)
    pick = gate.pick()
    assert (pick.cuts, list(gate._early)) == (((0, (0, 1)), (2, (0, 1))), [0, 2])
    assert pick.cuts is not None
    gate.trained(pick.cuts, 1)
    assert not gate.gaps
    gate.generated(0, 2, 0, 0, 1)
    gate.scored(0, 2, 0, 1.0)
    gate.drop(0, [2], "stale")
    assert list(gate.gaps) == [pytest.approx(1 / 2 - 2 / 3)]
    assert {sample.early for sample in gate.ended if not sample.reason} == {True}


def test_tokens_of_an_attempt_that_was_given_up_are_counted() -> None:
    gate = scored_group(1.0)
    assert gate.restart(0, [0, 1]) == 1
    assert gate.abandoned_tokens == 10
    assert not gate.generated(0, 1, 0, 0, 0)
    assert gate.generated(0, 2, 0, 0, 0), "a member that was not restarted goes on"


def test_what_is_being_trained_cannot_be_dropped() -> None:
    gate = scored_group(1.0, 0.0, members=2)
    assert gate.pick().cuts == ((0, (0, 1)),)
    with pytest.raises(IllegalTransition, match="it is training"):
        gate.drop(0, [1], "poison")


def test_block_lets_no_older_weights_start_a_group_than_those_it_was_drawn_at() -> None:
    for policy, oldest in (("block", 3), ("mask", 1)):
        gate = Gate(GateConfig(1, 2, 2, policy, 4), version=3)  # type: ignore[arg-type]
        assert gate.not_before(gate.draw()) == oldest


@pytest.mark.trap("short_first")
@pytest.mark.parametrize("policy", ["mask", "drop", "block", "admit"])
def test_what_was_drawn_first_trains_first_in_whatever_order_it_was_finished(policy: Any) -> None:
    gate = Gate(GateConfig(groups=2, members=2, limit=1, policy=policy, slots=8))
    drawn = [gate.draw() for _ in range(4)]
    for group in reversed(drawn):
        for member in range(2):
            ready(gate, group, member, float(member))
    assert [group for group, _ in gate.pick().cuts or ()] == drawn[:2]


@pytest.mark.trap("unscorable")
def test_a_sample_without_a_reward_leaves_baseline_and_batch_and_is_counted() -> None:
    gate = scored_group(1.0, 0.0, None, members=3)
    assert gate.group(0).rewards() == {0: 1.0, 1: 0.0}, "not 0"
    gate.stop_drawing()
    assert gate.pick().cuts == ((0, (0, 1)),)
    assert [(sample.member, sample.reason) for sample in gate.ended] == [(2, "unscorable")]
