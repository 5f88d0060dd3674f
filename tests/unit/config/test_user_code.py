"""A name that the user gives is found, or the message says which names there are; its source is checked unrun."""

import ast
from pathlib import Path

import pytest

from asyncrl.config.user_code import names_in, resolve, source_problem, suggestion
from asyncrl.errors import ConfigError
from tests import golden


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "mine.py"
    path.write_text("def right(sample):\n    return 1.0\n")
    return path


def test_a_file_is_loaded_once(file: Path) -> None:
    assert resolve(f"{file}:right", "here")(None) == 1.0
    assert resolve(f"{file}:right", "here") is resolve(f"{file}:right", "here")


def test_a_file_that_failed_to_load_is_tried_again(file: Path) -> None:
    file.write_text("raise KeyError('the user')\n")
    with pytest.raises(KeyError, match="the user"):
        resolve(f"{file}:right", "here")
    file.write_text("right = 2\n# another size, so that no stale bytecode is taken\n")
    assert resolve(f"{file}:right", "here") == 2


@pytest.mark.parametrize("spec", golden.cases(__file__, "test_what_cannot_be_loaded"), ids=str)
def test_what_cannot_be_loaded(file: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place and the closest name are told."""
    monkeypatch.chdir(file.parent)
    with golden.raises(ConfigError):
        resolve(spec, "task.prompts")


def test_only_what_a_file_defines_is_offered(file: Path) -> None:
    file.write_text(
        "import json\nfrom pathlib import Path\nfrom asyncrl import train\nfrom os import getcwd\n"
        "from functools import partial\nclass Mine: pass\ndef right(sample):\n    return 1.0\n"
        "half = partial(right)\nTABLE = {}\n_hidden = 1\n"
    )
    with golden.raises(ConfigError, match="TABLE"):
        resolve(f"{file}:nosuch", "here")
    passing = file.with_name("passing_on.py")
    passing.write_text("from asyncrl import train\n")
    with golden.raises(ConfigError):
        resolve("passing_on:nosuch", "here")


def test_of_many_names_the_first_are_told_and_how_many_more_there_are() -> None:
    assert suggestion("zz", [f"name{number}" for number in range(13)]).endswith(", name11 and 1 more")
    assert suggestion("zz", [f"name{number}" for number in range(12)]).endswith(", name10, name11")
    assert suggestion("nmae3", [f"name{number}" for number in range(13)]) == "; did you mean name3?"


SOURCE = """
import sys, os.path as paths
from math import exp as e
raise SystemExit("this file was run")

first, (second, *third) = 1, (2, 3)
fourth: int = 4
def made():
    global later
    hidden = later = 1
class Judge:
    method = 1
if sys:
    def conditional(): ...
else:
    other = [unbound for unbound in ()]
with open("x") as file:
    async def waiting(): ...
match first:
    case [head, *tail]: ...
    case {"key": picked, **others}: ...
    case int(exact) as whole: ...
    case _: ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def f(:\n")
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('this package was imported')\n")
    (package / "inner.py").write_text("def right(): ...\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_names_bound_at_the_top_level() -> None:
    names = names_in(ast.parse(SOURCE))
    assert names is not None
    assert names - {"unbound"} == {
        *("sys", "paths", "e", "first", "second", "third", "fourth", "made", "later", "Judge"),
        *("conditional", "other", "file", "waiting"),
        *("head", "tail", "picked", "others", "exact", "whole"),
    }


@pytest.mark.parametrize(
    "source",
    ["from a import *", "globals()['f'] = 1", "def __getattr__(name): ...", "def g():\n    exec('f = 1')"],
)
def test_a_module_that_may_have_any_name(source: str) -> None:
    assert names_in(ast.parse(source)) is None


@pytest.mark.parametrize(
    "spec",
    [
        "mine.py:made",
        "mine:waiting",
        "package_of_mine.inner:right",
        "json:dumps",
        "asyncrl.rewards.templates:exact_match",
        "math:exp",
        "sys:exit",
    ],
)
def test_what_is_there_is_no_mistake(folder: Path, spec: str) -> None:
    assert source_problem(spec, "here") is None


@pytest.mark.parametrize("spec", golden.cases(__file__, "test_a_mistake_in_a_name"), ids=str)
def test_a_mistake_in_a_name(folder: Path, spec: str) -> None:
    golden.says(source_problem(spec, "here"))


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("broken.py:f", "{folder}/broken.py is not valid Python: line 1: invalid syntax"),
        ("mine.py:hidden", "mine.py has no hidden"),
    ],
)
def test_a_mistake_in_a_file(folder: Path, spec: str, told: str) -> None:
    assert str(source_problem(spec, "here")).startswith(f"here: {told.format(folder=folder)}")
