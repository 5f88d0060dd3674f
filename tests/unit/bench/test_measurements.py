import subprocess
import sys

import pytest

from asyncrl.bench.measurements import RoundValues, goal_line, in_turn, number, own_seconds, ratios, round_values, table

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
