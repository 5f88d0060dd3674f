"""What is kept of a run, from the lines that it wrote."""

from typing import Any

import pytest

from asyncrl.bench.learning.training_runs import POINTS, WINDOW, summarise, task_reward, trained_by_decile

EVALUATIONS = [{"mean": 0.2, "stderr": 0.05}, {"mean": 0.5, "stderr": 0.04}, {"mean": 0.9, "stderr": 0.03}]


def lines(rewards: list[float], **more: Any) -> list[dict[str, Any]]:
    """Two seconds a step."""
    return [
        {
            "time": 2.0 * step,
            "reward/mean": reward,
            "staleness/mean": 1.5,
            "staleness/max": 2.0,
            "completions/length_mean": 5.0,
            **more,
        }
        for step, reward in enumerate(rewards, 1)
    ]


def test_the_goal_is_reached_by_five_steps_and_not_by_a_lucky_one() -> None:
    outcome = summarise(lines([0.1, 1.0, 1.0, 0.1, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]), EVALUATIONS, 0.8, 0.0)
    assert (outcome["steps_to_goal"], outcome["seconds_to_goal"]) == (10, 20.0)  # 0.9 x 5, and 0.74 one step before
    assert outcome["seconds"] == 22.0
    early = summarise(lines([1.0] * 10), EVALUATIONS, 0.8, 0.0)
    assert early["steps_to_goal"] == WINDOW


def test_a_goal_that_was_never_reached_took_no_time() -> None:
    outcome = summarise(lines([0.7] * 30), EVALUATIONS, 0.8, 0.0)
    assert outcome["seconds_to_goal"] is None
    assert outcome["steps_to_goal"] is None


def test_held_out_rewards_are_of_the_first_and_the_last_version() -> None:
    outcome = summarise(lines([0.5] * 9), EVALUATIONS, 0.8, 0.25)
    assert (outcome["held_out_before"], outcome["held_out"], outcome["held_out_stderr"]) == (0.2, 0.9, 0.03)
    assert outcome["others"] == 0.25
    assert outcome["cost"] is None
    with_costs = [{**EVALUATIONS[0], "cost": 0.4}, {**EVALUATIONS[-1], "cost": 0.01234567}]
    assert summarise(lines([0.5] * 9), with_costs, 0.8, 0.25)["cost"] == 0.0123


def test_a_curve_has_both_ends_and_so_many_points_for_every_length() -> None:
    for steps in (40, 250, 1001):
        curve = summarise(lines([0.5] * steps), EVALUATIONS, 0.8, 0.0)["curve"]
        assert len(curve) == POINTS
        assert (curve[0], curve[-1]) == ((1, 2.0, 0.5), (steps, 2.0 * steps, 0.5))


def test_a_punishment_that_the_algorithm_adds_is_no_reward_of_the_task() -> None:
    (line,) = lines([0.5])
    assert task_reward(line) == 0.5
    assert task_reward({**line, "reward/overlong": -0.25}) == 0.75


def test_shares_by_length_are_means_over_the_steps_that_tell_them() -> None:
    telling = [{f"staleness/trained_tokens/d{d}": share for d in range(1, 11)} for share in (0.5, 1.0)]
    assert trained_by_decile([{}, *telling]) == [0.75] * 10
    assert trained_by_decile([{}]) == []


def test_steps_without_a_number_do_not_count() -> None:
    found = lines([0.5] * 4)
    found[0]["staleness/mean"] = found[0]["staleness/max"] = None
    outcome = summarise(found, EVALUATIONS, 0.8, 0.0)
    assert (outcome["staleness_mean"], outcome["staleness_max"]) == (1.5, 2.0)
    assert outcome["mismatch_kl"] == pytest.approx(0.0)
