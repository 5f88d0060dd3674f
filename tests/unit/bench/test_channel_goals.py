"""The verdicts of `asyncrl-bench channels`: ratios within a round, bounds either way, systems that are not there."""

import pytest

from asyncrl.bench.channel_goals import GOALS, Goal, seen, table, verdicts


def goal(name: str, least: bool, bound: float) -> Goal:
    return Goal(name, "a over b", bound, lambda found: found["a"]["x"] / found["b"]["x"], least)


@pytest.mark.parametrize(("ratio", "least", "reached"), [(3.0, True, True), (2.9, True, False), (3.1, False, False)])
def test_a_goal_bounds_from_below_or_above(ratio: float, least: bool, reached: bool) -> None:
    assert goal("G", least, 3.0).reached(ratio) is reached


def test_ratios_pair_what_one_round_measured() -> None:
    rounds = [{"a": {"x": 4.0}, "b": {"x": 2.0}}, {"a": {"x": 90.0}, "b": {"x": 30.0}}, {"a": {"x": 5.0}}]
    assert seen(goal("G", True, 1.0), rounds) == [2.0, 3.0]


def test_goals_beside_a_system_that_is_not_there_are_not_measured() -> None:
    lines = list(verdicts([{"asyncrl": {"rtt_p50_us": 150.0}, "limits": {"rtt_p50_us": 40.0}}]))
    assert len(lines) == len(GOALS)
    assert "MISSED" in lines[0]
    assert all("not measured" in line for line in lines[1:])


def test_the_table_shows_medians_and_ranges() -> None:
    lines = list(table([{"a": {"x": 1.0}}, {"a": {"x": 5.0}}, {"a": {"x": 3.0}}]))
    assert lines[0] == "a:"
    assert lines[1].split() == ["x", "3", "[1", "-", "5]"]
