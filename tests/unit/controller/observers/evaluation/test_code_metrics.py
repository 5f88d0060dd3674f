"""Rates of programs, of a step and of held-out problems."""

import pytest

from asyncrl.controller.observers.evaluation import CodeRates, code_metrics

RIGHT, PARTLY, BROKEN = (
    {"compiles": compiles, "passes_tests": passed} for compiles, passed in ((1.0, 1.0), (1.0, 0.75), (0.0, 0.0))
)


def test_only_programs_that_pass_all_their_tests_pass() -> None:
    samples = [RIGHT, PARTLY, PARTLY, BROKEN]
    assert code_metrics(samples) == {"code/compile_rate": 0.75, "code/pass_rate": 0.25}


def test_rewards_that_are_not_about_programs_have_no_rates() -> None:
    assert code_metrics([{"exact_match": 1.0}]) == {}
    assert CodeRates.of([[{"exact_match": 1.0}]]) is None


def test_held_out_rates_are_means_over_problems() -> None:
    rates = CodeRates.of([[RIGHT, BROKEN, BROKEN], [BROKEN, BROKEN, BROKEN], [PARTLY, PARTLY, RIGHT]])
    assert rates is not None
    found = rates.metrics()
    assert found["eval/code/compile_rate"] == pytest.approx(4 / 9)
    assert found["eval/code/pass_at_1"] == pytest.approx(2 / 9)
    assert found["eval/code/pass_at_2"] == pytest.approx(4 / 9)
    assert "eval/code/pass_at_4" not in found
    assert found["eval/code/pass_at_1_low"] < found["eval/code/pass_at_1"] < found["eval/code/pass_at_1_high"]


def test_samples_that_could_not_be_scored_are_left_out() -> None:
    rates = CodeRates.of([[RIGHT, {}], [{}, {}], [RIGHT, BROKEN]])
    assert rates is not None
    assert rates.pass_at[1].mean == 0.75
    assert list(rates.pass_at) == [1]


def test_rates_are_said_with_their_intervals() -> None:
    rates = CodeRates.of([[RIGHT]] * 4)
    assert str(rates) == "pass@1 1.000 [0.510 - 1.000], compiles 1.000 [0.510 - 1.000]"
