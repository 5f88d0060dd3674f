from dataclasses import replace
from typing import Any

import pytest

from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards import Sample, templates
from asyncrl.tasks import load_prompts
from tests import golden


def sample(text: str, tokens: int = 1, **row: Any) -> Sample:
    return Sample("p", text, {"prompt": "p", **row}, group=0, member=0, finish="stop", tokens=tokens)


def test_exact_match() -> None:
    assert templates.exact_match()(sample(" cba\n", answer="cba")) == 1
    assert templates.exact_match()(sample("CBA", answer="cba")) == 0
    assert templates.exact_match(column="wanted", ignore_case=True)(sample("CBA", wanted="cba")) == 1
    assert templates.exact_match()(sample("7", answer=7)) == 1


@pytest.mark.parametrize(
    ("text", "opened", "reward"),
    [
        ("<think>5?</think>7", False, 1),
        ("<think>7</think>5", False, 0),
        ("7</think>5", False, 0),
        ("5?</think>7", True, 1),
        ("7", True, 0),
        ("<think>7", False, 0),
        ("7 <think>so", False, 0),
        ("5 <think>no</think>7", False, 1),
    ],
)
@pytest.mark.parametrize("template", ["exact_match", "numeric", "math_verify"])
def test_thoughts_are_no_answer(template: str, text: str, opened: bool, reward: float) -> None:
    if template == "math_verify":
        pytest.importorskip("math_verify")
    given = replace(sample(text, answer="7"), opened=opened)
    assert templates.TEMPLATES[template]()(given) == reward


def test_the_form_and_the_length_are_those_of_the_whole_completion() -> None:
    given = sample("<think>one two</think>three")
    assert templates.regex_format("<think>.*</think>three")(given) == 1
    assert templates.length(2, 1, unit="words")(given) == -1
    assert templates.repetition(1)(sample("<think> a a </think> b")) < 0


def test_a_missing_column_names_the_closest() -> None:
    with golden.raises(RewardError, match=r"column answer.*mean answers\?"):
        templates.exact_match()(sample("x", answers="x"))


@pytest.mark.parametrize(
    ("given", "wanted", "reward"),
    [
        ("caf\u00e9", "cafe\u0301", 1),
        ("cafe\u0301", "caf\u00e9", 1),
        ("\uac00", "\u1100\u1161", 1),
        ("\u212b", "\u00c5", 1),
        ("cafe", "caf\u00e9", 0),
        ("", "x", 0),
        (" \n", "x", 0),
    ],
)
def test_texts_that_unicode_writes_in_two_ways_are_equal(given: str, wanted: str, reward: float) -> None:
    assert templates.exact_match()(sample(given, answer=wanted)) == reward
    assert templates.exact_match(ignore_case=True)(sample(given.upper(), answer=wanted)) == reward


@pytest.mark.parametrize(
    ("given", "wanted", "reward"),
    [
        ("1", "1.0", 1),
        ("1.0", "1.0", 1),
        ("-3", "-3.0", 1),
        ("1", "1.5", 0),
        ("1.2", "1.2.0", 0),
        ("1", 1.0, 1),
        ("0.1", 0.10000000149011612, 1),
        ("0.7", 0.699999988079071, 1),
        ("1e-07", 1.0000000116860974e-07, 1),
        ("0.10000000149011612", 0.10000000149011612, 1),
        ("0.2", 0.10000000149011612, 0),
        ("0.5", 0.5, 1),
        ("0.1", 0.1, 1),
        ("0.1", 0.1000000001, 0),
    ],
)
def test_numbers_of_tables_may_be_written_in_short(given: str, wanted: object, reward: float) -> None:
    assert templates.exact_match()(sample(given, answer=wanted)) == reward


@pytest.mark.parametrize("template", ["exact_match", "numeric", "math_verify"])
@pytest.mark.parametrize("wanted", ["", " \n", None, b"12", bytearray(b"12")])
def test_a_row_without_an_answer_in_text_is_refused(template: str, wanted: object) -> None:
    with golden.raises(RewardError):
        templates.TEMPLATES[template]()(sample("12", answer=wanted))


REASONING = "<reasoning>\nx\n</reasoning>\n<answer>\n5\n</answer>"
THINKING = "<think>\nx\n</think>\n<answer>\n5\n</answer>"


@pytest.mark.parametrize(
    ("pattern", "form"),
    [
        (r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$", REASONING),
        (r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", THINKING),
        (r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", REASONING),
        (r"^\s*<reasoning>.*?</reasoning>\s*<answer>.*?</answer>\s*$", REASONING),
        (r"^[\s]{0,}<think>.+?</think>.*?<answer>(.+?)</answer>[\s]{0,}$", THINKING),
        (r"(?s)\A<think>.*</think>.*\Z", THINKING),
        (r"(?m)^<think>$.*^</answer>$", THINKING),
        (r"\n<think>.*</answer>", THINKING),
        (r"\n<think>.*</answer>\n", THINKING),
    ],
)
def test_patterns_that_people_share_match_with_and_without_space_around(pattern: str, form: str) -> None:
    reward = templates.regex_format(pattern)
    for text in (form, form + "\n", "\n" + form, f" \n{form}\n\n"):
        assert reward(sample(text)) == 1
    for text in ("", "\n", "5", form[3:], f"well: {form}"):
        assert reward(sample(text)) == 0


def test_the_pattern_may_have_the_mark_that_a_chat_template_wrote() -> None:
    reward = templates.regex_format(r"^<think>.*?</think>\s*<answer>.*?</answer>$")
    text = "\nx\n</think>\n<answer>\n5\n</answer>"
    assert reward(sample(text)) == 0
    assert reward(replace(sample(text), opened=True)) == 1
    assert reward(replace(sample("x <answer>5</answer>"), opened=True)) == 0


def test_regex_format() -> None:
    reward = templates.regex_format(r"<a>.*</a>")
    assert reward(sample(" <a>two\nlines</a> ")) == 1
    assert reward(sample("well: <a>x</a>")) == 0
    with pytest.raises(ConfigError, match="is no regular expression"):
        templates.regex_format("(")


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("1,234.50 dollars", "#### 1234.5", 1),
        ("4", "-4", 0),
        ("1e3", 1000, 1),
        ("no number", 1, 0),
        ("0.3333", 1 / 3, 0),
        ("", "5", 0),
        ("The product is 7006653", "7006652", 0),
        ("The product is 7006652", "7006652", 1),
        ("12345678901234567890", "12345678901234567891", 0),
        ("12345678901234567891", 12345678901234567891, 1),
        ("12.0", "12", 1),
        ("12", 12.0, 1),
        ("12.0000001", "12", 0),
        ("0", "1.6e-19", 0),
        ("1.6e-19", "0", 0),
        ("0.0", "0", 1),
        ("9.1e-31", "6.63e-34", 0),
        ("6.63e-34", "6.63e-34", 1),
        ("0.33333333", "1/3", 1),
        ("1/3", "0.333333", 1),
        ("1/7", "0.142857", 1),
        ("0.33", "1/3", 0),
        ("3", 0.1 + 0.2 + 2.7, 1),
        ("3.14159", "3.14159265", 1),
        ("3.1416", "3.14159265", 0),
        ("-1e-9", "1e-9", 0),
        ("1/2", "0.5", 1),
        ("9" * 3000, "9" * 2999 + "8", 0),
        ("答案是12。", "12元", 1),
    ],
)
def test_numeric_is_exact_for_whole_numbers_and_relative_for_others(text: str, answer: object, reward: float) -> None:
    assert templates.numeric()(sample(text, answer=answer)) == reward


def test_a_tolerance_is_a_share_of_the_number() -> None:
    assert templates.numeric(tolerance=0.01)(sample("0.3333", answer=1 / 3)) == 1
    assert templates.numeric(tolerance=0.01)(sample("1010", answer=1000)) == 1
    assert templates.numeric(tolerance=0.01)(sample("1011", answer=1000)) == 0
    assert templates.numeric(tolerance=0.1)(sample("1.1", answer="1.0")) == 1
    assert templates.numeric(tolerance=0.1)(sample("0.1", answer=0)) == 0
    assert templates.numeric(tolerance=0)(sample("0.33333333", answer="1/3")) == 0
    for tolerance in (-0.1, 1, float("nan")):
        with golden.raises(ConfigError, match="0.*under 1"):
            templates.numeric(tolerance=tolerance)


@pytest.mark.parametrize(
    "answer",
    ["three", r"(-\infty, 2)", [3, "x", 12], {"value": 5, "year": 2024}, [], "2 hours 30 minutes", "3 or 4", True],
)
def test_a_row_that_is_no_single_number_is_an_error(answer: object) -> None:
    with golden.raises(RewardError):
        templates.numeric()(sample("12", answer=answer))


@pytest.mark.parametrize(("tokens", "reward"), [(0, 0), (60, 0), (80, -0.5), (100, -1), (400, -1)])
def test_length_is_the_soft_overlong_punishment_of_dapo(tokens: int, reward: float) -> None:
    assert templates.length(maximum=100, slack=40)(sample("", tokens)) == pytest.approx(reward)


def test_length_in_other_units() -> None:
    assert templates.length(maximum=4, slack=2, unit="words")(sample("a b c")) == -0.5
    assert templates.length(maximum=4, slack=2, unit="characters")(sample("abcd")) == -1
    with golden.raises(ConfigError, match="mean words"):
        templates.length(maximum=4, slack=2, unit="word")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="between 1 and maximum"):
        templates.length(maximum=4, slack=5)


def test_repetition() -> None:
    reward = templates.repetition(words=2)
    assert reward(sample("a b c d")) == 0
    assert reward(sample("a b a b a")) == -0.5
    assert reward(sample("a")) == 0
    with pytest.raises(ConfigError, match="at least 1"):
        templates.repetition(words=0)


def test_reasoning_gym_scores_the_entry_the_prompt_came_from() -> None:
    prompts = load_prompts("reasoning_gym:chain_sum", {"size": 4, "seed": 2, "max_terms": 3})
    row = prompts.row(3).columns
    whole = templates.reasoning_gym()
    last = templates.reasoning_gym(pattern=r"(-?\d+)\D*$")
    assert whole(sample(row["answer"], **row)) == 1
    assert whole(sample("x", **row)) < 1
    assert last(sample(f"The answer is {row['answer']}.", **row)) == 1
    assert last(sample("none", **row)) == 0


def test_reasoning_gym_needs_its_rows() -> None:
    with pytest.raises(RewardError, match="no column reasoning_gym"):
        templates.reasoning_gym()(sample("x"))
