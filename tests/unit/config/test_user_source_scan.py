"""A user's source is judged without running it, and only for what is certain."""

from pathlib import Path

import pytest

from asyncrl.config.user_source_scan import names_in, source_problem

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
    names = names_in(SOURCE.encode())
    assert names is not None
    assert names - {"unbound"} == {
        *("sys", "paths", "e", "first", "second", "third", "fourth", "made", "later", "Judge"),
        *("conditional", "other", "file", "waiting"),
    }


@pytest.mark.parametrize(
    "source",
    ["from a import *", "globals()['f'] = 1", "def __getattr__(name): ...", "def g():\n    exec('f = 1')"],
)
def test_a_module_that_may_have_any_name(source: str) -> None:
    assert names_in(source.encode()) is None


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


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("right", '"right" names no function; write FILE.py:NAME'),
        ("mien.py:made", "there is no file {folder}/mien.py; did you mean mine.py?"),
        ("mine.py:mad", "mine.py has no mad; did you mean made?"),
        ("mine.py:hidden", "mine.py has no hidden"),
        ("mine:mad", "mine has no mad; did you mean made?"),
        ("broken.py:f", "{folder}/broken.py is not valid Python: invalid syntax"),
        ("no_such_module:f", "there is no module no_such_module; a file is written as FILE.py:NAME"),
        ("package_of_mine.outer:right", "there is no module package_of_mine.outer"),
        ("package_of_mine.inner:rihgt", "package_of_mine.inner has no rihgt; did you mean right?"),
    ],
)
def test_mistakes_are_told_with_the_closest_name(folder: Path, spec: str, told: str) -> None:
    assert str(source_problem(spec, "here")).startswith(f"here: {told.format(folder=folder)}")
