"""Goals of `asyncrl-bench channels`: ratios within a round, bounds on either side, systems that do not run."""

import pytest

from asyncrl.bench.transfer_speed import channels
from asyncrl.bench.transfer_speed.channels import GOALS, Goal, goal_lines, result_lines


def goal(at_most: bool, bound: float) -> Goal:
    return Goal("G", "a over b", bound, ("a", "x"), ("b", "x"), at_most)


@pytest.mark.parametrize(("ratio", "at_most", "met"), [(3.0, False, True), (2.9, False, False), (3.1, True, False)])
def test_a_goal_bounds_from_below_or_above(
    ratio: float, at_most: bool, met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "GOALS", [goal(at_most, 3.0)])
    (line,) = goal_lines([{"a": {"x": ratio}, "b": {"x": 1.0}}])
    assert ("MISSED" in line) is not met


def test_ratios_pair_the_values_of_one_round() -> None:
    rounds = [{"a": {"x": 4.0}, "b": {"x": 2.0}}, {"a": {"x": 90.0}, "b": {"x": 30.0}}, {"a": {"x": 5.0}}]
    assert goal(False, 1.0).ratios(rounds) == [2.0, 3.0]


def test_a_goal_can_bound_a_value_itself() -> None:
    assert Goal("G", "a", 1.0, ("a", "x"), None, True).ratios([{"a": {"x": 4.0}}, {"b": {"x": 1.0}}]) == [4.0]


def test_goals_beside_a_system_that_does_not_run_are_not_measured() -> None:
    lines = list(goal_lines([{"asyncrl": {"rtt_p50_us": 150.0}, "limits": {"rtt_p50_us": 40.0}}]))
    assert len(lines) == len(GOALS)
    assert "MISSED" in lines[0]
    assert all("not measured" in line for line in lines[1:])


def test_the_table_shows_medians_and_ranges() -> None:
    lines = list(result_lines([{"a": {"x": 1.0}}, {"a": {"x": 5.0}}, {"a": {"x": 3.0}}]))
    assert lines[0] == "a:"
    assert lines[1].split() == ["x", "3", "[1", "-", "5]"]
