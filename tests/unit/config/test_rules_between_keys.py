"""Values that are valid one by one and make no sense together: each line of TOML in the file of messages, with what is
said about it."""

import tomllib

import pytest

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.errors import ConfigError
from tests import golden

NOTHING = "NONE"
"""Stands for the lack of a value, of which TOML has no word."""


def written(line: str) -> Config:
    """Loads a config of keys that are separated by semicolons."""
    values = tomllib.loads(line.replace("; ", "\n"))
    for section in values.values():
        section |= {key: None for key, value in section.items() if value == NOTHING}
    least = {} if "env" in values.get("acting", {}) else {"model.name": "m", "task.prompts": "p.jsonl"}
    return load(None, (), {}, {**least, **values}).config


@pytest.mark.parametrize("line", golden.cases(__file__, "test_refused"), ids=str)
def test_refused(line: str) -> None:
    with golden.raises(ConfigError):
        written(line)


@pytest.mark.parametrize("line", golden.cases(__file__, "test_warned"), ids=str)
def test_warned(line: str) -> None:
    """A value that nothing reads, or that may be meant otherwise."""
    warnings = written(line).warnings
    assert warnings
    golden.says("\n".join(map(str, warnings)))


@pytest.mark.parametrize("line", golden.cases(__file__, "test_allowed"), ids=str)
def test_allowed(line: str) -> None:
    assert written(line).warnings == []
    golden.says("allowed")


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("a.b", "mine.toml:3", "is wrong"), "mine.toml:3: a.b: is wrong"),
        (Problem("a.b", "--a.b", "is wrong"), "--a.b: is wrong"),
        (Problem("a.b", "", "is wrong", ("c.d",)), "a.b, c.d: is wrong"),
        (Problem("a.b", "c.d (mine.toml:3)", "is wrong", ("c.d",)), "c.d (mine.toml:3), a.b: is wrong"),
        (Problem("a.b", "a.b (--a.b), c.d (--c.d)", "is wrong", ("c.d",)), "a.b (--a.b), c.d (--c.d): is wrong"),
        (Problem("", "", "is wrong"), "is wrong"),
    ],
)
def test_a_problem_names_each_key_once(problem: Problem, text: str) -> None:
    assert str(problem) == text
