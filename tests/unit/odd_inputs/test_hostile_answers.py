"""Whatever the policy writes, a template that reads text returns a number: no answer ends a run."""

from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rewards import Sample, templates
from asyncrl.rewards.sample import OfSample
from asyncrl.tasks import load_prompts

PIECES = (
    *(r"\boxed{", r"\fbox{", r"\frac{1}{0}", r"\frac{", r"\sqrt{", r"\text{", r"\left", r"\right", r"\infty", r"\log"),
    *(
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        r"\int_0^1",
        r"\sum_{i=1}^{n}",
        r"\\",
        r"\$",
        r"\mathrm{e}",
        r"\pi",
        r"\lim",
    ),
    *(
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "$",
        "$$",
        "^",
        "_",
        "&",
        "|",
        "/",
        "+",
        "*",
        "<",
        ">",
        "=",
        "%",
        "!",
        ",",
        ";",
        " ",
    ),
    *("9", "12", "-5", "0.1", "1e9", "1e999", "½", "²", "①", "٣", "∞", "元", "万", "。", "，", "答案是", "x", "i", "e"),
    *("<think>", "</think>", '{"answer":', '"', "#### ", "nan", "inf", "or", "and", "True", "None", "\n", "\x00"),
    *("\ud7ff", "\U0010ffff", "\u202e", "\ufeff"),
)
ANSWERS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=60)
ROWS = ("12", r"\frac{1}{2}", "0.333333")
MADE = {
    "exact_match": templates.exact_match(ignore_case=True),
    "regex_format": templates.regex_format(r"^<think>.*?</think>\s*<answer>.*?</answer>\n$"),
    "numeric": templates.numeric(),
    "length": templates.length(10, 5, "words"),
    "repetition": templates.repetition(),
    "environment": templates.environment(),
}


def score(template: OfSample, text: str, opened: bool, **row: object) -> object:
    return template(Sample("p", text, {"prompt": "p", **row}, 0, 0, "stop", 1, opened=opened))


@settings(max_examples=300, deadline=None)
@given(ANSWERS, st.sampled_from(ROWS), st.booleans())
def test_templates_score_any_answer(text: str, answer: str, opened: bool) -> None:
    for template in MADE.values():
        found = score(template, text, opened, answer=answer)
        assert isinstance(found, int | float)
        assert -1 <= found <= 1


@pytest.mark.skipif(find_spec("math_verify") is None, reason="the extra `math` is not installed")
@settings(max_examples=150, deadline=None)
@given(ANSWERS.filter(lambda text: text.count("9") + text.count("^") + text.count("!") < 4), st.sampled_from(ROWS))
def test_math_verify_scores_any_answer(text: str, answer: str) -> None:
    assert score(templates.math_verify(), text, False, answer=answer) in (0.0, 1.0)


@settings(max_examples=100, deadline=None)
@given(ANSWERS)
def test_reasoning_gym_scores_any_answer(text: str) -> None:
    row = load_prompts("reasoning_gym:chain_sum", {"size": 1, "seed": 2}).row(0).columns
    for template in (templates.reasoning_gym(), templates.reasoning_gym(pattern=r"(\d+)")):
        found = score(template, text, False, **{name: value for name, value in row.items() if name != "prompt"})
        assert isinstance(found, int | float)
