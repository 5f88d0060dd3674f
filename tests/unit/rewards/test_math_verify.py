"""The template `math_verify`, with the package math-verify where it is installed, and with a stand-in for it."""

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.install_hints import missing_packages
from asyncrl.config.schema import Config
from asyncrl.errors import RewardError
from asyncrl.rewards.sample import Sample
from asyncrl.rewards.templates import math_verify


def score(text: str, answer: str, **options: Any) -> Any:
    row = {"prompt": "p", "answer": answer, "solution": answer}
    return math_verify(**options)(Sample("p", text, row, 0, 0, "stop", 1))


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the stand-in parsed; two texts are equal if the same is left of them without `$`."""
    texts: list[str] = []

    def parse(text: str, parsing_timeout: float | None) -> list[str]:
        assert parsing_timeout is None, "the package's own limits work in main threads only"
        texts.append(text)
        return [text.strip("$")] if text.strip("$") else []

    package = SimpleNamespace(parse=parse, verify=lambda one, other, timeout_seconds: one == other)
    monkeypatch.setitem(sys.modules, "math_verify", package)
    return texts


def test_the_wanted_expression_is_marked_as_one(parsed: list[str]) -> None:
    assert score("72", "72") == 1
    assert score("71", "48 / 2 = 24 and 48 more\n#### 72", column="solution") == 0
    assert score("$x$", "$x$") == 1
    assert parsed == ["$72$", "72", "$72$", "71", "$x$", "$x$"]


def test_a_row_without_an_expression_is_an_error(parsed: list[str]) -> None:
    with pytest.raises(RewardError, match="math-verify finds no expression in the row's answer: ''"):
        score("72", "")
    with pytest.raises(RewardError, match="no column wanted"):
        score("72", "72", column="wanted")
    assert score("", "72") == 0


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.config.install_hints.find_spec", lambda name: None)
    sections = {"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, "reward": {"functions": ["math_verify"]}}
    (problem,) = missing_packages(Config.model_validate(sections))
    assert "math_verify is not installed; run: " in str(problem)
    assert "[math]" in str(problem)


@pytest.mark.skipif(
    find_spec("math_verify") is None, reason="the extra `math` is not installed: job environments has it"
)
@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("so it is \\boxed{\\frac{1}{2}}", "0.5", 1),
        ("so it's 36/72.", "\\frac12", 1),
        ("The answer is $x^2 + 2x + 1$.", "(x+1)^2", 1),
        ("#### 72", "24 + 48\n#### 72", 1),
        ("The answer is 71", "72", 0),
        ("I do not know", "72", 0),
        ("", "72", 0),
        ("$\\{1, 2\\}$", "\\{2, 1\\}", 1),
    ],
)
def test_equal_expressions(text: str, answer: str, expected: float) -> None:
    assert score(text, answer) == expected
