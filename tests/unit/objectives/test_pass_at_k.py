"""pass@k against all choices of k samples, and intervals against published values."""

from itertools import combinations
from statistics import fmean

import pytest

from asyncrl.objectives.pass_at_k import pass_at_k, rate_over


@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("passed", range(7))
def test_pass_at_k_is_the_share_of_choices_with_a_passing_sample(passed: int, k: int) -> None:
    samples = [number < passed for number in range(6)]
    assert pass_at_k(6, passed, k) == pytest.approx(fmean(any(chosen) for chosen in combinations(samples, k)))


@pytest.mark.parametrize(("passed", "low", "high"), [(0, 0, 0.2775), (1, 0.0179, 0.4042), (5, 0.2366, 0.7634)])
def test_intervals_of_ten_problems_are_wilson_s(passed: int, low: float, high: float) -> None:
    rate = rate_over([1.0] * passed + [0.0] * (10 - passed))
    assert rate == pytest.approx((passed / 10, low, high), abs=1e-4)


def test_an_interval_narrows_with_problems_and_stays_within_bounds() -> None:
    few, many = rate_over([1.0] * 10), rate_over([1.0] * 100)
    assert few.low < many.low < many.high == pytest.approx(few.high) == 1.0
    assert rate_over([0.5] * 4) == pytest.approx((0.5, 0.15004, 0.84996), abs=1e-4)
