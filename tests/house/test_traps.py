"""docs/traps.md: no trap is missing, and every test that it names holds that trap, is collected, and is named."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAPS = (
    *("tempered_logprobs", "raw_logprobs", "restricted_sampling", "sampling_of_the_model", "greedy_training"),
    *("several_ends", "end_is_padding", "invented_end", "truncated", "stop_strings", "chat_template"),
    *("rewritten_history", "micro_batches", "masked_denominators", "batch_length_divisor", "equal_rewards"),
    *("group_of_one", "unscorable", "which_deviation", "dropout", "packing", "small_updates", "engines_disagree"),
    *("kl_gradient", "whole_answer_weight", "redone", "short_first", "fast_groups", "old_cache", "not_finite"),
    *("seeds", "padded_vocabulary"),
)
ROWS = [line.strip("|").split(" | ") for line in (ROOT / "docs/traps.md").read_text().splitlines() if "| `" in line[:3]]
Named = set[tuple[str, str, str]]
"""Trap, file, name of a test."""


def words() -> list[str]:
    return [row[0].strip(" `") for row in ROWS]


def named_in_the_page() -> Named:
    found = ((row[0].strip(" `"), re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[-1])) for row in ROWS)
    return {(word, file, name) for word, tests in found for file, name in tests}


def marked_in(file: Path) -> Iterator[tuple[str, str, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in map(ast.unparse, node.decorator_list):
                if found := re.fullmatch(r"pytest\.mark\.trap\('(\w+)'\)", mark):
                    yield found[1], str(file.relative_to(ROOT)), node.name


def marked() -> Named:
    return {found for file in sorted((ROOT / "tests").rglob("test_*.py")) for found in marked_in(file)}


def test_no_trap_is_missing() -> None:
    assert sorted(words()) == sorted(TRAPS)
    assert len(TRAPS) == len(set(TRAPS)) == 32


@pytest.mark.parametrize("row", ROWS, ids=words())
def test_every_trap_names_its_remedy_and_its_tests(row: list[str]) -> None:
    word, mistake, instead, tests = row
    assert len(mistake) > 20
    assert len(instead) > 20
    assert re.search(r"`tests/[\w/]+\.py::test_\w+`", tests), f"no test holds {word}"


def test_page_and_marks_of_tests_name_the_same_traps() -> None:
    assert named_in_the_page() == marked()


class _Collected:
    """A plugin of pytest that notes the tests of a collection by file and name."""

    def __init__(self) -> None:
        self.tests: set[tuple[str, str]] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        functions = [item for item in session.items if isinstance(item, pytest.Function)]
        self.tests = {(str(item.path.relative_to(ROOT)), item.originalname) for item in functions}


def test_every_test_named_by_a_trap_is_collected() -> None:
    """In this process, which has imported torch for other tests already."""
    collected = _Collected()
    files = sorted({file for _, file, _ in named_in_the_page()})
    options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "trap"]
    assert pytest.main([*options, *(str(ROOT / file) for file in files)], plugins=[collected]) == pytest.ExitCode.OK
    assert collected.tests == {(file, name) for _, file, name in named_in_the_page()}
