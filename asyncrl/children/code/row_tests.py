"""Finds the tests of programs in a row, as HumanEval, MBPP, unittest, pytest, APPS, CodeContests and LiveCodeBench have
them. A test that asserts nothing passes every program, so it is refused."""

import ast
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from asyncrl.children.sandbox import TestCase
from asyncrl.config.asserted_tests import asserts, live_and_waiting, names_of_program
from asyncrl.errors import TaskError

STDIN, STDOUT = ("stdin", "input", "inputs"), ("stdout", "output", "outputs", "expected_output")
BESIDE = frozenset(("name", "testtype", "type", "metadata"))
RUN = """
def _run(*tests):  # Classes of unittest, and classes and functions as pytest does without its fixtures.
    import unittest
    ran, base = 0, unittest.IsolatedAsyncioTestCase
    for test in tests:
        if not isinstance(test, type):
            test = type("Test", (base,), {"test": staticmethod(test)})
        elif not issubclass(test, unittest.TestCase):
            test = type(test.__name__, (test, base), {"setUp": lambda self: getattr(self, "setup_method", str)()})
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(test)(result)
        assert result.wasSuccessful(), [text.strip().splitlines()[-1] for _, text in result.failures + result.errors]
        ran += result.testsRun - len(result.skipped)
    assert ran, "no test ran"
_run({})
"""


def cases_in(row: Mapping[str, Any], column: str) -> tuple[TestCase, ...]:
    """Returns the tests of a row. Raises TaskError, which names the column, where there are none, where they are
    something else, and for a test that asserts nothing."""
    if column not in row:
        raise TaskError(f"the row has no column {column} with tests; found are {', '.join(row)}")
    given = _read(row[column])
    found = [given] if isinstance(given, str | Mapping) else given
    if not isinstance(found, list | tuple) or not found:
        raise TaskError(f"the row's {column} are no list of tests, but {repr(given)[:80]}")
    named = [(_read(each), f"{column}[{number}]") for number, each in enumerate(found)]
    return tuple(case for each, name in named for case in _cases(each, name, row, several=isinstance(given, Mapping)))


def _read(given: Any) -> Any:
    """Returns what JSON text, or Python's writing of a list or a table, holds; other values as they are."""
    if not isinstance(given, str) or given.lstrip()[:1] not in ("[", "{", "(", '"'):
        return given
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = read(given.strip())
            return value if isinstance(value, list | tuple | dict | str) else given
    return given


def _cases(given: Any, name: str, row: Mapping[str, Any], *, several: bool) -> Iterator[TestCase]:
    """Yields the tests of one text or table. several: a table of lists has a test in each place."""
    table = {"code": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
    table = {key: value for key, value in table.items() if value is not None}
    asked = [key for key in STDIN if key in table]
    wanted = [key for key in STDOUT if key in table]
    if set(table) <= {"name", "code"} and isinstance(table.get("code"), str) and table["code"].strip():
        parts = [row.get(column) or [] for column in ("test_imports", "test_setup_code")]  # MBPP
        setup = "".join(f"{part if isinstance(part, str) else chr(10).join(part)}\n" for part in parts if part)
        code = _asserted(setup + table["code"], str(row.get("entry_point") or ""), name)
        yield TestCase(str(table.get("name", name)), code=code)
    elif len(wanted) == 1 and set(table) <= {*asked[:1], *wanted, *BESIDE} and table.get("testtype") != "functional":
        inputs, outputs = table[asked[0]] if asked else "", table[wanted[0]]
        if not (
            isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple) and (several or "inputs" in table)
        ):
            yield _pair(str(table.get("name", name)), inputs, outputs)
            return
        if len(inputs) != len(outputs) or not inputs:
            raise TaskError(f"the row's {name} has {len(inputs)} {asked[0]} and {len(outputs)} {wanted[0]}")
        for number, (one, other) in enumerate(zip(inputs, outputs, strict=True)):
            yield _pair(f"{name}[{number}]", one, other)
    else:
        raise TaskError(f"the row's {name} is no test: write asserts, or `stdin` and `stdout`, not {repr(given)[:80]}")


def _pair(name: str, given: Any, wanted: Any) -> TestCase:
    """Returns the test of one input and its output."""
    texts = ["\n".join(map(str, each)) if isinstance(each, list | tuple) else each for each in (given, wanted)]
    if not all(isinstance(each, str | int | float) for each in texts):
        raise TaskError(f"the row's {name} is no test: inputs and outputs are texts, not {repr(texts)[:80]}")
    return TestCase(name, stdin=str(texts[0]), stdout=str(texts[1]))


@lru_cache(maxsize=1024)  # Texts of tests of some batches: each sample reads them.
def _asserted(source: str, entry: str, name: str) -> str:
    """Returns a test that runs all that it asserts; raises TaskError where that is nothing."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"the row's {name} is no Python: {error}") from None
    tree = ast.fix_missing_locations(_Meant().visit(tree))
    code = source if ast.dump(ast.parse(source)) == ast.dump(tree) else ast.unparse(tree)
    calls, run = _unrun(tree, entry)
    code += "".join(f"\n{call}" for call in calls) + (RUN.replace("{}", ", ".join(run)) if run else "")
    if names_of_program(code) and any(map(asserts, live_and_waiting(ast.parse(code))[0])):
        return code
    advice = "write asserts, or name its entry_point for `check`"
    raise TaskError(f"the row's {name} asserts nothing of the program: {advice}, not {source!r:.80}")


class _Meant(ast.NodeTransformer):
    """Asserts comparisons that nothing reads, and runs what runs as a script only."""

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Compare | ast.BoolOp | ast.UnaryOp):
            return ast.Assert(node.value)
        return ast.Pass() if ast.unparse(node.value).startswith(("unittest.main(", "pytest.main(")) else node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        return node.body if "__name__" in ast.unparse(node.test) else node


def _unrun(tree: ast.Module, entry: str) -> tuple[list[str], list[str]]:
    """Returns the calls of checks, and the classes and functions with tests, that nothing in the test runs."""
    calls, run = [], []
    for node in live_and_waiting(tree)[1].values():
        needed = [] if isinstance(node, ast.ClassDef) else node.args.args[len(node.args.defaults) :]
        if len(needed) == 1 and entry and (node.name == "check" or needed[0].arg == "candidate"):
            calls.append(f"{node.name}({entry})")
        elif not needed and (node.name.lower().startswith("test") or (isinstance(node, ast.ClassDef) and node.bases)):
            run.append(node.name)
    return calls, run
