"""Which answers pass, and rewards under which none can."""

import re
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.rewards.templates import pass_problems, reaches


@pytest.mark.parametrize(
    ("value", "threshold", "summed", "right"),
    [
        (0.7 + 0.2 + 0.1, 1.0, 0.0, True),
        (0.9999999998, 1.0, 0.0, True),
        (0.99999, 1.0, 0.0, False),
        (0.3 - 0.1 - 0.2, 0.0, 0.6, True),
        (0.3 - 0.1 - 0.2, 0.0, 0.0, False),
        (-7.000000000000001, -7.0, 0.0, True),
        (1e-12, 1e-10, 0.0, False),
        (float("nan"), 1.0, 0.0, False),
    ],
)
def test_a_sum_reaches_a_threshold_but_for_rounding(value: float, threshold: float, summed: float, right: bool) -> None:
    assert reaches(value, threshold, summed) == right


def weighted(*pairs: tuple[str, float]) -> list[dict[str, Any]]:
    return [{"use": use, "weight": weight} for use, weight in pairs]


@pytest.mark.parametrize(
    ("functions", "keys", "says"),
    [
        (
            weighted(("numeric", 0.7), ("compiles", 0.2), ("repetition", 0.1)),
            {},
            'is at most 0.9, .*pass_term = "numeric"',
        ),
        (
            weighted(("own.py:right", 0.7), ("own.py:form", 0.2)),
            {},
            "^with values of own.py:right and own.py:form up to 1 no answer",
        ),
        (weighted(("own.py:right", 0.5)), {}, "^with values of own.py:right up to 1 no answer can pass"),
        (weighted(("numeric", -1.0), ("compiles", 0.5)), {}, "is at most 0.5, "),
        (
            weighted(("numeric", 1.0), ("repetition", 0.1)),
            {"pass_term": "repetition"},
            "the term repetition is at most 0",
        ),
        (weighted(("numeric", 1.0)), {"pass_reward": 2.0}, "evaluate.pass_reward is 2"),
        (weighted(("numeric", 0.7), ("compiles", 0.2), ("lint", 0.1)), {}, ""),
        (weighted(("numeric", 0.7), ("compiles", 0.2)), {"pass_reward": 0.9}, ""),
        (weighted(("numeric", 0.7), ("compiles", 0.2)), {"pass_term": "numeric"}, ""),
        (weighted(("passes_tests", 0.5), ("compiles", 0.2)), {}, ""),
        (weighted(("repetition", -1.0), ("numeric", 0.1)), {}, ""),
        (weighted(("numeric", 0.5)), {"samples": 1, "temperature": 0.0}, ""),
        (weighted(("own.py:right", 0.5)), {"pass_term": "right/exact"}, ""),
        ([{"use": "own.py:right", "weight": 0.5, "by_token": True}], {}, ""),
    ],
)
def test_a_reward_under_which_no_answer_can_pass_is_told(
    functions: list[dict[str, Any]], keys: dict[str, Any], says: str
) -> None:
    held_out = {"prompts": "q", "samples": 4, "temperature": 1.0, **keys}
    sections = {"model": {"name": "m"}, "task": {"prompts": "p"}, "reward": {"functions": functions}}
    found = list(pass_problems(Config.model_validate({**sections, "evaluate": held_out})))
    assert len(found) == bool(says)
    assert all(each.is_warning and re.search(says, each.text) for each in found)


HELD_OUT = {"prompts": "q.jsonl", "samples": 4, "temperature": 1.0}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"pass_term": "numerc"},
            r"^evaluate\.pass_term: .* have no term numerc; did you mean numeric\?",
        ),
        (
            {"sets": {"programs": {"prompts": "c", "functions": ["compiles"]}}, "pass_term": "numeric"},
            r"evaluate\.sets\.programs\.pass_term: the rewards",
        ),
        ({"pass_term": "numeric"}, ""),
        ({"pass_term": "shape/brief"}, ""),
        ({"sets": {"programs": {"prompts": "c", "functions": ["compiles"], "pass_term": "compiles"}}}, ""),
    ],
)
def test_the_term_by_which_answers_pass_is_one_of_the_rewards(keys: dict[str, Any], says: str) -> None:
    functions = ["numeric", {"use": "own.py:shape"}]
    sections = {"model": {"name": "m"}, "task": {"prompts": "p"}, "reward": {"functions": functions}}
    values = {**sections, "evaluate": {**HELD_OUT, **keys}}
    found = [str(each) for each in pass_problems(Config.model_validate(values)) if not each.is_warning]
    assert len(found) == bool(says)
    assert all(re.search(says, each) for each in found)
