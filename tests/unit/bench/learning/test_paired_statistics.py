import math

import pytest

from asyncrl.bench.learning.paired_statistics import (
    T_95,
    differences,
    recovered_share,
    spread,
    upper_bound,
)


def test_the_bound_is_students_t_of_the_mean() -> None:
    # mean 0.02, sample variance 0.00025, of five values: 0.02 + 2.132 * sqrt(0.00025 / 5)
    assert upper_bound([0.0, 0.01, 0.02, 0.03, 0.04]) == pytest.approx(0.02 + 2.132 * math.sqrt(0.00005))


def test_one_pair_bounds_nothing_and_more_than_ten_are_bounded_cautiously() -> None:
    assert upper_bound([0.0]) == math.inf
    assert upper_bound([0.0, 1.0] * 10) > 0.5 + 1.729 * 0.513 / math.sqrt(20)  # t of 19 degrees of freedom
    assert list(T_95.values()) == sorted(T_95.values(), reverse=True)


def test_sides_are_compared_over_the_seeds_that_both_have() -> None:
    assert differences({0: 1.0, 1: 0.9, 2: 0.1}, {2: 0.3, 0: 0.75, 7: 5.0}) == [0.25, pytest.approx(-0.2)]
    assert differences({0: 1.0}, {1: 1.0}) == []


def test_a_spread_of_one_seed_has_no_deviation() -> None:
    alone, several = spread([0.5]), spread([0.2, 0.4, 0.6])
    assert (alone.mean, alone.seeds, math.isnan(alone.deviation)) == (0.5, 1, True)
    assert several.mean == pytest.approx(0.4)
    assert several.deviation == pytest.approx(0.2)
    assert (several.lowest, several.highest) == (0.2, 0.6)


@pytest.mark.parametrize(
    ("corrected", "share"), [({0: 0.5, 1: 0.5}, 0.0), ({0: 0.9, 1: 0.7}, 1.0), ({0: 0.6, 1: 0.7}, 0.5)]
)
def test_recovered_share_counts_from_the_uncorrected_run(corrected: dict[int, float], share: float) -> None:
    assert recovered_share({0: 0.9, 1: 0.7}, {0: 0.5, 1: 0.5}, corrected) == pytest.approx(share)


def test_a_share_is_taken_over_the_seeds_of_all_three() -> None:
    assert recovered_share({0: 1.0, 1: 1.0}, {0: 0.5, 1: 0.0, 2: 0.0}, {0: 0.75, 2: 9.0}) == 0.5


def test_where_nothing_was_lost_nothing_is_recovered() -> None:
    assert math.isnan(recovered_share({0: 0.5}, {0: 0.5}, {0: 0.9}))
    assert math.isnan(recovered_share({0: 0.5}, {0: 0.6}, {0: 0.9}))
