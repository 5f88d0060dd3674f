"""The template `math_verify`, with the package math-verify where it is installed, and with a stand-in for it."""

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.install_hints import missing_packages
from asyncrl.config.schema import Config
from asyncrl.errors import RewardError
from asyncrl.rewards import package_scores
from asyncrl.rewards.package_scores import equal_expression
from asyncrl.rewards.sample import Sample
from asyncrl.rewards.templates import math_verify
from tests import golden


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
    assert equal_expression("72")("72") == 1
    assert equal_expression("$x$")("$x$") == 1
    assert equal_expression("72")("") == 0
    assert equal_expression("$")("72") is None
    assert parsed[:4] == ["$72$", "72", "$x$", "$x$"]


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    package_scores._expressions.cache_clear()


def test_a_row_without_an_expression_is_an_error() -> None:
    with golden.raises(RewardError, match="'so ####'"):
        score("72", "so ####")
    with golden.raises(RewardError, match="column wanted"):
        score("72", "72", column="wanted")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.config.install_hints.find_spec", lambda name: None)
    sections = {"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, "reward": {"functions": ["math_verify"]}}
    (problem,) = missing_packages(Config.model_validate(sections))
    golden.says(str(problem), "math_verify")
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
        # thoughts and boxes
        ("<think>\\boxed{3}</think> \\boxed{5}", "5", 1),
        ("<think>\\boxed{5}</think> \\boxed{3}", "5", 0),
        ("\\boxed{3}\n\\boxed{5}", "5", 1),
        ("\\boxed{3} and \\boxed{5}", "3", 0),
        ("\\boxed{3}, then $5$", "3", 1),
        ("<think>so \\boxed{5}, or", "5", 0),
        ("so \\boxed{5", "5", 0),
        ("\\boxed{$5$}", "5", 1),
        ("\\fbox{5}", "5", 1),
        ("\\boxed{\\text{Paris}}", "\\text{Paris}", 1),
        # prices, other scripts
        ("\\boxed{18}", "\\$18", 1),
        ("It costs \\$18.", "\\$18", 1),
        ("\\boxed{\\$18}", "$\\$18$", 1),
        ("\\boxed{\\$1{,}800}", "\\$1800", 1),
        ("答案是12。", "12", 1),
        ("\\boxed{12元}", "12", 1),
        ("\\boxed{12}", "12元", 1),
        # values that the package calls equal
        ("$\\frac{1}{2^{98}}$", "\\frac{1}{2^{99}}", 0),
        ("$\\frac{1}{2^{99}}$", "\\frac{1}{2^{99}}", 1),
        ("$2^{-98}$", "2^{-99}", 0),
        ("$10^{-20}$", "0", 0),
        ("$x + 10^{-20}$", "x", 0),
        ("$x = 10^{-20}$", "x = 10^{-21}", 0),
        ("$\\{1, 10^{-20}\\}$", "\\{1, 10^{-21}\\}", 0),
        ("$(0, 10^{-20})$", "(0, 10^{-21})", 0),
        ("0.0000001", "0.0000002", 0),
        ("$\\sqrt{2} + 10^{-30}$", "\\sqrt{2}", 0),
        ("$1 + \\frac{1}{\\mathrm{e}}$", "1 - \\frac{1}{\\mathrm{e}}", 0),
        ("$1 - \\frac{1}{e}$", "1 - \\frac{1}{\\mathrm{e}}", 1),
        # and that are
        ("0.333333", "\\frac{1}{3}", 1),
        ("$9\\%$", "9", 1),
        ("$\\sin(x)^2 + \\cos(x)^2$", "1", 1),
        ("$\\frac{\\sqrt{8}}{2}$", "\\sqrt{2}", 1),
        ("$x > 2$", "x > 2", 1),
        ("$(-\\infty, 2)$", "(-\\infty, 2)", 1),
        ("$\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}$", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", 1),
        # powers of ten, mixed numbers
        ("$10^{-7}$", "1e-07", 1),
        ("$e-7$", "1e-07", 0),
        ("0.00005", "5e-05", 1),
        ("\\boxed{10^{22}}", "1e+22", 1),
        ("It is 10000000000.", "1e10", 1),
        ("2000", "2e3", 1),
        ("It is 1e-7.", "1e-07", 1),
        ("3.5", "3 1/2", 1),
        ("$-\\frac{7}{2}$", "-3 1/2", 1),
        ("1.5", "3 1/2", 0),
        # bases and units
        ("\\boxed{2516_9}", "2516_8", 0),
        ("\\boxed{2516_{8}}", "2516_8", 1),
        ("2516", "2516_8", 0),
        ("$x_1 = 3$", "x_1 = 3", 1),
        ("$\\int_0^1 x dx$", "\\frac{1}{2}", 1),
        ("5 cm", "5 km", 0),
        ("\\boxed{5\\text{ cm}}", "5 km", 0),
        ("The length is 5 cm.", "5 cm", 1),
        ("\\boxed{5}", "5 km", 1),
        ("5 lbs", "5 lb", 1),
        # choices
        ("The answer is (A).", "A", 1),
        ("A", "A", 1),
        ("**A**", "(A)", 1),
        ("\\boxed{\\text{(A)}}", "A", 1),
        ("\\boxed{B}", "A", 0),
        ("The answer is A or B", "A", 0),
        ("(A) or (B)", "B", 0),
        ("A dog", "A", 0),
        # boxes near each other, prices
        ("\\boxed{3}, \\boxed{5}", "3", 0),
        ("\\boxed{3}\\boxed{5}", "5", 1),
        ("12", "\\$12", 1),
        ("\\boxed{32{,}000}", "\\$32,\\!000", 1),
        # brackets inside each other
        ("$" + "(" * 40 + "5" + ")" * 40 + "$", "5", 0),
        ("\\boxed{" + "{" * 40 + "5" + "}" * 40 + "}", "5", 0),
        ("\\boxed{((5))}", "5", 1),
    ],
)
def test_equal_expressions(text: str, answer: str, expected: float) -> None:
    assert score(text, answer) == expected
