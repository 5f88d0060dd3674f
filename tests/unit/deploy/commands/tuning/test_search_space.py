"""The values of a search as they are typed, and mistakes in them."""

from typing import Any

import pytest

from asyncrl.deploy.commands.tuning.search import Dimension, parse_space
from asyncrl.errors import ConfigError

distributions = pytest.importorskip("optuna", reason="Optuna (extra `tune`) is not installed").distributions

RATE = "training.learning_rate"


def parse_dimension(text: str) -> Dimension:
    (found,) = parse_space([text])
    return found


def is_range(found: Dimension, expected: Any) -> bool:
    return bool(found.distribution == expected) and found.ends == (expected.low, expected.high)


def test_ranges_and_choices() -> None:
    rates = distributions.FloatDistribution(1e-5, 1e-3, log=True)
    assert is_range(parse_dimension(f"{RATE}=1e-5..1e-3:log"), rates)
    assert is_range(parse_dimension("staleness.limit=0..4"), distributions.IntDistribution(0, 4))
    assert parse_dimension("staleness.policy=mask,drop").choices == ("mask", "drop")
    assert parse_dimension("training.gradient_checkpointing=true,false").choices == (True, False)
    assert parse_dimension(f"{RATE}=1e-4,3e-4").ends == (1e-4, 3e-4)
    assert parse_dimension("training.betas=[0.9, 0.99],[0.8, 0.9]").choices == ([0.9, 0.99], [0.8, 0.9])
    assert parse_dimension("task.prompts=../a.jsonl,../b.jsonl").choices == ("../a.jsonl", "../b.jsonl")
    assert parse_dimension('task.system="one, two",three').choices == ('"one', ' two"', "three")
    assert parse_dimension('task.system="one, two","three"').choices == ("one, two", "three")


def test_values_can_be_typed_again() -> None:
    assert parse_dimension(f"{RATE}=1e-5..1e-3:log").of(0.000123456) == 0.000123
    assert parse_dimension("staleness.policy=mask,drop").of(1) == "drop"
    assert parse_dimension("staleness.limit=0..4").of(3) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RATE, "write KEY=LOW..HIGH"),
        (f"{RATE}=", "write KEY=LOW..HIGH"),
        ("training.learning_rat=1..2", "did you mean training.learning_rate"),
        ("staleness.policy=1..2", "two different values"),
        ("seed=3,4", "all candidates have the same seeds"),
        ("steps=2,4", "compared after the same steps"),
        (f"{RATE}=1..2:square", "no scale 'square'"),
        ("staleness.limit=0.5..2", "must be integers"),
        (f"{RATE}=a..b", "must be numbers"),
        (f"{RATE}=2..1", "below the second"),
        (f"{RATE}=0..1:log", "begins above 0"),
        ("staleness.policy=mask,mask", "two different values"),
    ],
)
def test_mistakes_say_what_to_write(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_dimension(text)


def test_a_key_is_given_once() -> None:
    with pytest.raises(ConfigError, match=f"{RATE} is given twice"):
        parse_space([f"{RATE}=1..2", f"{RATE}=2..3"])
