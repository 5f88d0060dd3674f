"""Answers of rows as tables have them: which completions are right, or why none can be."""

import math
from typing import Any

import pytest

from asyncrl.errors import RewardError
from asyncrl.rewards import Sample, templates

RIGHT: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a whole number": (5, ("5", " 5\n")),
    "a whole number that a table made a fraction": (5.0, ("5", "5.0")),
    "a fraction": (0.5, ("0.5",)),
    "a truth value": (True, ("true", "True")),
    "a number as text": ("5.0", ("5.0",)),
}
WRONG: dict[str, tuple[Any, str]] = {
    "null": (None, "the row's answer is None: write an answer, or remove the row"),
    "NaN": (math.nan, "the row's answer is nan: write an answer"),
    "an empty text": ("", "the row's answer is '': write an answer, or remove the row"),
    "white space": (" \n", r"the row's answer is ' \\n': write an answer, or remove the row"),
}


@pytest.mark.parametrize(("answer", "completions"), RIGHT.values(), ids=RIGHT)
def test_completions_that_equal_an_answer(answer: Any, completions: tuple[str, ...]) -> None:
    assert [score(text, answer) for text in completions] == [1.0] * len(completions)
    assert score("6", answer) == 0.0


@pytest.mark.parametrize("template", [templates.exact_match, templates.numeric, templates.math_verify])
@pytest.mark.parametrize(("answer", "says"), WRONG.values(), ids=WRONG)
def test_no_answer(template: Any, answer: Any, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        template()(sample("None", answer))
    with pytest.raises(RewardError, match=says):
        template()(sample("", answer))


@pytest.mark.parametrize("answer", [["a", "b"], {"text": "a"}, []])
def test_texts_are_not_compared_with_lists(answer: Any) -> None:
    with pytest.raises(RewardError, match=r"the row's answer is [\[{].*and exact_match compares texts: name a column"):
        score("a", answer)


def sample(text: str, answer: Any) -> Sample:
    return Sample("p", text, {"prompt": "p", "answer": answer}, group=0, member=0, finish="stop", tokens=1)


def score(text: str, answer: Any) -> float:
    return float(templates.exact_match()(sample(text, answer)))
