import math
import subprocess
import sys

import pytest

from asyncrl.bench.measurements import (
    T_95,
    RoundValues,
    differences,
    goal_line,
    in_turn,
    number,
    own_seconds,
    ratios,
    recovered_share,
    round_values,
    table,
    upper_bound,
)

WORK = "import time; sum(range(20_000_000)); print(time.process_time(), flush=True); input()"
"""Says how many CPU seconds it took, and lives on."""


def test_sides_take_turns_in_an_order_that_turns_around() -> None:
    order: list[str] = []

    def side(name: str, value: float) -> float:
        order.append(name)
        return value

    found = in_turn({"a": lambda: side("a", len(order)), "b": lambda: side("b", 10)}, rounds=3)
    assert "".join(order) == "abbaab"
    assert found == {"a": [0, 3, 4], "b": [10, 10, 10]}
    assert round_values(found)["a"].median == 3


def test_ratios_are_of_the_same_round() -> None:
    assert ratios(RoundValues((2.0, 9.0)), RoundValues((1.0, 3.0))).values == (2.0, 3.0)


@pytest.mark.parametrize(
    ("value", "goal", "at_most", "met"),
    [(2.0, 2.0, False, True), (1.99, 2.0, False, False), (0.01, 0.01, True, True), (0.02, 0.01, True, False)],
)
def test_goals(value: float, goal: float, at_most: bool, met: bool) -> None:
    assert ("MISSED" in goal_line("it", value, goal, at_most=at_most)) is not met


def test_numbers_keep_what_matters() -> None:
    assert [number(value) for value in (12345.6, 99.94, 0.00123)] == ["12,346", "99.9", "0.00123"]


def test_columns_line_up() -> None:
    lines = table(("", "value"), [("long name", "1"), ("b", "22")]).splitlines()
    assert {line.index(cell) for line, cell in zip(lines, ("value", "1", "22"), strict=True)} == {13}


def test_what_a_child_uses_that_lives_is_no_use_of_others() -> None:
    before = own_seconds()
    grandchild = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORK!r}])"
    with subprocess.Popen([sys.executable, "-c", grandchild], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None, "a pipe"
        used = float(child.stdout.readline())
        assert own_seconds() - before >= used - 0.03  # The kernel counts in hundredths.
        child.communicate(b"\n")
    assert own_seconds() - before >= used - 0.03


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
