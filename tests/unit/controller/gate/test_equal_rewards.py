"""Groups of equal rewards, where a signal is needed: dropped with a reason, replaced, and told by length."""

import pytest

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import Stage
from asyncrl.controller.observers.staleness_report import StalenessReport
from asyncrl.objectives.advantages import RewardedCut, group_estimate, turn_advantages


def gate(rewards: list[list[float]], *, members: int = 2, cut_at: int | None = None, tokens: int = 5) -> Gate:
    """Groups with these rewards, in order; members without one still run."""
    config = GateConfig(len(rewards), members, 1, "mask", 16, cut_at, need_signal=True)
    made = Gate(config)
    for of_group in rewards:
        group = made.draw()
        for member, reward in enumerate(of_group):
            assert made.generated(group, member, 0, 0, 0, tokens + 10 * group)
            assert made.scored(group, member, 0, reward)
    return made


@pytest.mark.trap("fast_groups")
def test_a_group_of_equal_rewards_leaves_with_a_reason() -> None:
    made = gate([[1.0, 1.0], [1.0, 0.0]])
    pick = made.pick()
    assert [(drop.group.id, drop.members, drop.reason) for drop in pick.dropped] == [(0, (0, 1), "no_signal")]
    assert pick.cuts is None, "another group takes its place first"
    assert made.may_draw()


def test_groups_with_a_signal_train_as_ever() -> None:
    assert gate([[0.5, 1.0], [1.0, 0.0]]).pick().cuts == ((0, (0, 1)), (1, (0, 1)))


def by_turn(parts: tuple[tuple[float, ...], ...], turn_discount: float | None) -> Gate:
    """One group whose samples have the reward 1 in these parts."""
    made = Gate(GateConfig(1, 2, 1, "mask", 16, need_signal=True, turn_discount=turn_discount))
    group = made.draw()
    for member, turns in enumerate(parts):
        made.generated(group, member, 0, 0, 0, 5)
        made.scored(group, member, 0, 1.0, turns)
    return made


LAST_TURNS = (((0.0, 1.0), (0.0, 0.0, 1.0)), ((0.0, 1.0), ()))
"""Pairs whose returns differ only where later rewards are discounted."""
TURNS = [
    (((1.0, 0.0), (0.0, 1.0)), True),
    (((0.5, 0.5), (0.5, 0.5)), False),
    (((0.0, 0.0, 1.0), (0.0, 1.0, 0.0)), True),
    *((each, True) for each in LAST_TURNS),
    (((), ()), False),
]


@pytest.mark.parametrize("discount", [0.9, 1.0])
@pytest.mark.parametrize(("parts", "differ"), TURNS)
def test_turns_whose_returns_differ_are_a_signal_for_advantages_by_turn(
    parts: tuple[tuple[float, ...], ...], differ: bool, discount: float
) -> None:
    """The gate drops exactly the groups whose advantages by turn are all 0."""
    estimate = group_estimate("group_mean", normalize_std=False)
    cut = RewardedCut(0, (0, 1), {0: 1.0, 1: 1.0}, turns=dict(enumerate(parts)))
    taught = any(advantage for turns in turn_advantages([cut], estimate, discount)[0] for advantage in turns)
    assert taught == (differ and not (discount == 1.0 and parts in LAST_TURNS))
    for turn_discount, trains in ((discount, taught), (None, False)):
        pick = by_turn(parts, turn_discount).pick()
        assert [drop.reason for drop in pick.dropped] == ([] if trains else ["no_signal"])
        assert (pick.cuts is not None) == trains


def test_parts_that_a_resume_restores_are_a_signal_from_then_on() -> None:
    made = by_turn(((), ()), 0.9)
    assert 0 in made._unusable
    made.parts_restored(0, 0, (1.0, 0.0))
    made.parts_restored(0, 1, (0.0, 1.0))
    assert made.pick().cuts == ((0, (0, 1)),)


def test_a_part_of_a_group_waits_for_a_reward_that_differs() -> None:
    made = gate([[1.0, 1.0]], members=4, cut_at=2)
    made.stop_drawing()
    assert made.pick() == made.pick()
    assert made.members(0, Stage.READY) == (0, 1)
    made.generated(0, 2, 0, 0, 0, 5)
    made.scored(0, 2, 0, 0.0)
    assert made.may_cut(made._groups[0])


def test_a_dropped_reward_stays_in_the_baseline_of_siblings_that_are_sampled_again() -> None:
    made = gate([[1.0, 1.0, 1.0]], members=4)
    made.drop(0, [0], "no_signal")
    made.drop(0, [1], "poison")
    assert made.group(0).rewards() == {0: 1.0, 2: 1.0}


@pytest.mark.parametrize("need_signal", [True, False])
@pytest.mark.trap("fast_groups")
def test_the_share_accepted_is_told_by_length(need_signal: bool) -> None:
    made = gate([[1.0, float(group >= 8)] for group in range(10)])
    report = StalenessReport(GateConfig(1, 2, 1, "mask", 16, need_signal=need_signal))
    made.pick()
    metrics = report.step(made, [])
    accepted = {name: value for name, value in metrics.items() if name.startswith("sampling/")}
    assert not need_signal or accepted["sampling/accepted"] == 0.0
    assert bool(accepted) == need_signal


@pytest.mark.trap("fast_groups")
def test_long_groups_that_are_accepted_are_seen_as_such() -> None:
    made = gate([[1.0, float(group < 5)] for group in range(10)])
    made.stop_drawing()
    pick = made.pick()
    assert pick.cuts is not None
    assert sum(len(members) for _, members in pick.cuts) < made.config.batch
    made.trained(pick.cuts, 1)
    report = StalenessReport(made.config)
    metrics = report.step(made, [])
    assert metrics["sampling/accepted"] == 0.5
    assert [metrics[f"sampling/accepted/d{number}"] for number in range(1, 11)] == [0.0] * 5 + [1.0] * 5
