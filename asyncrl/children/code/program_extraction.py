"""Finds the program in an answer of a policy, and its tests in the row of the prompt."""

import re
from collections.abc import Mapping
from typing import Any

from asyncrl.children.sandbox import TestCase
from asyncrl.errors import TaskError

FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
BEFORE = "before"
"""Column with text that is put before the code of an answer: the beginning of a function, imports."""
FIELDS = ("name", "code", "stdin", "stdout")


def code_in(answer: str, row: Mapping[str, Any]) -> str:
    """Returns the code of the first fenced block, of an answer without one the whole text; what the row has in the
    column `before` comes first."""
    before = row.get(BEFORE) or ""
    block = FENCED.search(answer)
    return f"{before}{answer}" if block is None else "\n".join(filter(None, (before, block[1])))


def cases_in(row: Mapping[str, Any], column: str) -> tuple[TestCase, ...]:
    """Returns the tests of a row: a text with asserts, a list of such texts, or of tables with `code` or with `stdin`
    and `stdout`. Raises TaskError, which names the column, where there are none or they are something else."""
    if column not in row:
        raise TaskError(f"the row has no column {column} with tests; found are {', '.join(row)}")
    given = row[column]
    found = [given] if isinstance(given, str | Mapping) else given
    if not isinstance(found, list | tuple) or not found:
        raise TaskError(f"the row's {column} are no list of tests, but {repr(given)[:80]}")
    return tuple(_test(each, f"{column}[{number}]") for number, each in enumerate(found))


def _test(given: Any, name: str) -> TestCase:
    if isinstance(given, str) and given.strip():
        return TestCase(name, code=given)
    if isinstance(given, Mapping) and all(isinstance(each, str) for each in given.values()):
        is_code, is_text = "code" in given, "stdout" in given
        if is_code != is_text and not (is_code and "stdin" in given) and set(given) <= set(FIELDS):
            return TestCase(**{"name": name, **given})
    raise TaskError(
        f"the row's {name} is no test: write a text of Python with asserts, or a table with `stdin` and `stdout` as "
        f"texts, not {repr(given)[:80]}"
    )
