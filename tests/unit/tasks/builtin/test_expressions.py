"""The tiny programming task: its tests accept right programs only, and demonstrations are a third of programs."""

import random
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest

from asyncrl.children.code.source_checker import checked
from asyncrl.tasks.builtin import expressions
from asyncrl.tasks.builtin.expressions import DEMONSTRATIONS, expression


def passes(source: str, row: dict[str, Any]) -> bool:
    """Runs expressions of our own making, which needs no sandbox."""
    if checked(source)["error"]:
        return False
    names: dict[str, Any] = {}
    exec(source, names)
    try:
        exec("\n".join(row["tests"]), names)
    except (AssertionError, TypeError, ZeroDivisionError):
        return False
    return True


@pytest.mark.parametrize("rows", [expressions.training(300), expressions.held_out(300, seed=1)])
def test_answers_pass_the_tests_of_their_row_and_of_hardly_any_other(rows: list[dict[str, Any]]) -> None:
    assert all(passes(row["answer"], row) for row in rows)
    assert all(checked(row["answer"]) == {"error": "", "findings": []} for row in rows)
    others = pairwise(rows)
    assert fmean(passes(other["answer"], row) for row, other in others) < 0.02


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([("add", 3), ("times", 2)], "(x+3)*2"),
        ([("times", 3), ("add", 2)], "x*3+2"),
        ([("add", 1), ("times", 2), ("times", 4)], "(x+1)*2*4"),
        ([("times", 2), ("subtract", 1), ("times", 4)], "(x*2-1)*4"),
    ],
)
def test_parentheses_stand_where_a_sum_is_multiplied(steps: list[tuple[str, int]], wanted: str) -> None:
    assert expression(steps) == wanted


def test_demonstrations_compile_seldom_and_pass_more_seldom() -> None:
    source = random.Random(0)
    rows = {row["prompt"]: row for row in expressions.training(4000)}
    drawn = [(prompt, said) for prompt, said in (DEMONSTRATIONS.draw(source) for _ in range(6000)) if prompt in rows]
    assert 0.3 < fmean(not checked(said)["error"] for _, said in drawn) < 0.4
    assert 0.1 < fmean(passes(said, rows[prompt]) for prompt, said in drawn) < 0.25
    assert 0.05 < fmean(bool(checked(said)["findings"]) for _, said in drawn) < 0.2


def test_no_list_is_both_trained_and_held_out_and_none_held_out_is_demonstrated() -> None:
    source = random.Random(0)
    shown = {DEMONSTRATIONS.draw(source)[0] for _ in range(4000)}
    held_out = {row["prompt"] for row in expressions.held_out(500, seed=1)}
    assert not held_out & (shown | {row["prompt"] for row in expressions.training(2000)})


def test_sentences_are_for_models_that_know_english() -> None:
    (row,) = expressions.training(1, style="sentence")
    assert row["tests"] == expressions.training(1)[0]["tests"]
    assert row["prompt"] == (
        "Write a Python function f(x) that takes a number x, subtracts 1, then subtracts 9, then subtracts 7, "
        "and returns the result."
    )
