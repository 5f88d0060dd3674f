"""docs/traps.md: no trap is missing, and it counts the tests that are marked with each, which are all collected."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [line.strip("|").split(" | ") for line in (ROOT / "docs/traps.md").read_text().splitlines() if "| `" in line[:3]]


def words() -> list[str]:
    return [row[0].strip(" `") for row in ROWS]


def marked_in(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yields trap, file and name of each test that is marked with a trap."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in map(ast.unparse, node.decorator_list):
                if found := re.fullmatch(r"pytest\.mark\.trap\('(\w+)'\)", mark):
                    yield found[1], str(file.relative_to(ROOT)), node.name


@cache
def marked() -> set[tuple[str, str, str]]:
    return {found for file in sorted((ROOT / "tests").rglob("test_*.py")) for found in marked_in(file)}


def test_no_trap_is_missing() -> None:
    assert len(words()) == len(set(words())) == 32


@pytest.mark.parametrize("row", ROWS, ids=words())
def test_every_trap_names_its_remedy_and_counts_its_tests(row: list[str]) -> None:
    word, mistake, instead, tests = row
    assert len(mistake) > 20
    assert len(instead) > 20
    held = sum(trap == word.strip(" `") for trap, _, _ in marked())
    assert held > 0, f"no test holds {word}"
    assert tests.strip() == str(held)


def test_no_test_is_marked_with_another_trap() -> None:
    assert {trap for trap, _, _ in marked()} == set(words())


class _Collected:
    """A plugin of pytest that notes the tests of a collection by file and name."""

    def __init__(self) -> None:
        self.tests: set[tuple[str, str]] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        functions = [item for item in session.items if isinstance(item, pytest.Function)]
        self.tests = {(str(item.path.relative_to(ROOT)), item.originalname) for item in functions}


def test_every_test_marked_with_a_trap_is_collected() -> None:
    """In this process, which has imported torch for other tests already."""
    collected = _Collected()
    files = sorted({file for _, file, _ in marked()})
    options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "trap"]
    assert pytest.main([*options, *(str(ROOT / file) for file in files)], plugins=[collected]) == pytest.ExitCode.OK
    assert collected.tests == {(file, name) for _, file, name in marked()}
