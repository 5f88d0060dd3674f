"""Finds the tests of programs in a row, in the forms of the usual data sets.

It is a text of Python with asserts or bare comparisons, `check(candidate)` of HumanEval, unittest or pytest; or a table
of `stdin` and `stdout`, also as APPS, TACO, CodeContests and LiveCodeBench write it. A test that asserts nothing passes
every program, so it is refused.
"""

import ast
import builtins
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.children.sandbox import TestCase
from asyncrl.config.asserted_tests import asserted
from asyncrl.errors import TaskError

SETUP = ("test_imports", "test_setup_code")  # columns of MBPP: code before each test, a text or a list of lines
ENTRY = "entry_point"  # column of HumanEval and BigCodeBench: the function that the tests are about
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BESIDE_HELPERS = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
SAYS_OBJECTS = re.compile(r"(?m)^\s*#\s*objects\s*=\s*true\s*$")
STDIN = ("stdin", "input", "inputs")
STDOUT = ("stdout", "output", "outputs", "expected_output")
FUNCTION = ("fn_name", "func_name", "function_name")
BESIDE = frozenset(("name", "testtype", "type", "metadata", *FUNCTION))
OF_FUNCTIONS = ("functional", "function_call")  # what LiveCodeBench and others call tests that call a function
CALL = """
import json
_plain = lambda value: json.loads(json.dumps(value), parse_float=lambda text: float(format(float(text), ".9g")))
try:
    _function = {name}
except NameError:
    _function = Solution().{name}
_given = _function(*{arguments!r})
assert _plain(_given) in _plain({wanted!r}), "it returned " + repr(_given)[:200]
"""
"""Calls a function, of the program or of its class Solution. JSON has no tuples, so that lists stand for them."""


def cases_in(row: Mapping[str, Any], column: str) -> tuple[TestCase, ...]:
    """Returns the tests of a row. Raises TaskError, which names the column, where there are none, where they are
    something else, and for a test that asserts nothing."""
    if column not in row:
        raise TaskError(f"the row has no column {column} with tests; found are {', '.join(row)}")
    given = _read(row[column])
    given = given.get("test_cases", given) if isinstance(given, Mapping) else given
    found = [given] if isinstance(given, str | Mapping) else given
    if not isinstance(found, list | tuple) or not found:
        raise TaskError(f"the row's {column} are no list of tests, but {repr(given)[:80]}")
    several = isinstance(given, Mapping)
    named = [(_read(each), f"{column}[{number}]") for number, each in enumerate(found)]
    return tuple(case for each, name in named for case in _cases(each, name, row, several=several))


def _read(given: Any) -> Any:
    """Returns what JSON text, or Python's writing of a list or a table, holds; other values as they are."""
    if not isinstance(given, str) or given.lstrip()[:1] not in ("[", "{", "(", '"'):
        return given
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(given.strip())
            return value if isinstance(value, list | tuple | dict | str) else given
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return given


def _cases(given: Any, name: str, row: Mapping[str, Any], *, several: bool) -> Iterator[TestCase]:
    """Yields the tests of one text or table. several: a table of lists has a test in each place."""
    table = {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    if isinstance(given, str) and given.strip():
        table = {"code": given}
    asked = [key for key in STDIN if key in table]
    wanted = [key for key in STDOUT if key in table]
    if set(table) <= {"name", "code", "objects"} and isinstance(table.get("code"), str) and table["code"].strip():
        parts = [_helpers(row), *(row.get(column) or "" for column in SETUP)]
        setup = "".join(f"{part if isinstance(part, str) else chr(10).join(part)}\n" for part in parts if part)
        code = asserted(setup + table["code"], str(row.get(ENTRY) or ""), name)
        objects = table.get("objects") is True or SAYS_OBJECTS.search(setup + table["code"]) is not None
        yield TestCase(str(table.get("name", name)), code=code, objects=objects)
    elif len(wanted) == 1 and len(asked) <= 1 and set(table) <= {*asked, *wanted, *BESIDE}:
        function = _function(table, row, name)
        inputs = table[asked[0]] if asked else ""
        outputs = table[wanted[0]]
        lists = isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple)
        if not (lists and (several or asked[0] == STDIN[-1])):
            yield _pair(str(table.get("name", name)), function, inputs, outputs)
            return
        if len(inputs) != len(outputs) or not inputs:
            raise TaskError(f"the row's {name} has {len(inputs)} {asked[0]} and {len(outputs)} {wanted[0]}")
        for number, (one, other) in enumerate(zip(inputs, outputs, strict=True)):
            yield _pair(f"{name}[{number}]", function, one, other)
    else:
        raise TaskError(
            f"the row's {name} is no test: write a text of Python with asserts, or a table with `stdin` and `stdout` "
            f"as texts, not {repr(given)[:80]}"
        )


def _helpers(row: Mapping[str, Any]) -> str:
    """Returns the functions that the row's `before` has beside the one that the program is to complete, with its
    imports and constants: a test that calls one means that of the row, and not what the program makes of its name."""
    try:
        body = ast.parse(before).body if isinstance(before := row.get("before"), str) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    functions = [each.name for each in body if isinstance(each, FUNCTIONS)]
    completed = (row.get(ENTRY), *functions[-1:])
    kept = [
        each
        for each in body
        if isinstance(each, BESIDE_HELPERS) or (isinstance(each, FUNCTIONS) and each.name not in completed)
    ]
    return "\n".join(map(ast.unparse, kept)) if {*functions} - {*completed} else ""


def _function(table: Mapping[str, Any], row: Mapping[str, Any], name: str) -> str:
    """Returns the function that a table of inputs and outputs is about; "" for one of standard input and output."""
    kind = str(table.get("testtype", table.get("type", "")))
    places = [table, _read(table.get("metadata"))]
    if kind in OF_FUNCTIONS:
        places += [row, _read(row.get("metadata")), {FUNCTION[0]: row.get(ENTRY)}]
    elif kind:
        return ""
    known = [place[key] for place in places if isinstance(place, Mapping) for key in FUNCTION if place.get(key)]
    if (known and (not str(known[0]).isidentifier() or hasattr(builtins, str(known[0])))) or (kind and not known):
        raise TaskError(f"the row's {name} calls {known[:1] or 'a function'}: name one of the program as its fn_name")
    return str(known[0]) if known else ""


def _pair(name: str, function: str, given: Any, wanted: Any) -> TestCase:
    """Returns the test of one input and its output."""
    if not function:
        texts = ["\n".join(map(str, each)) if isinstance(each, list | tuple) else each for each in (given, wanted)]
        if not all(isinstance(each, str | int | float) for each in texts):
            raise TaskError(f"the row's {name} is no test: inputs and outputs are texts, not {repr(texts)[:80]}")
        return TestCase(name, stdin=str(texts[0]), stdout=str(texts[1]))
    if isinstance(given, str):  # LiveCodeBench: a line of JSON for each argument.
        try:
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
            wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
        except ValueError as error:
            raise TaskError(f"the row's {name} has arguments of {function} that are no JSON: {error}") from None
    arguments = list(given) if isinstance(given, list | tuple) else [given]
    allowed = [wanted, *(wanted if isinstance(wanted, list) and len(wanted) == 1 else [])]  # APPS wraps some results.
    return TestCase(name, code=CALL.format(name=function, arguments=arguments, wanted=json.loads(json.dumps(allowed))))
