"""Finds the tests of programs in a row, in the forms of the usual data sets, and has each run all that it asserts.

It is a text of Python with asserts or bare comparisons, `check(candidate)` of HumanEval, unittest or pytest; or a table
of `stdin` and `stdout`, also as APPS, TACO, CodeContests and LiveCodeBench write it. A test that asserts nothing passes
every program, so it is refused.
"""

import ast
import builtins
import json
import re
import symtable
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from asyncrl.children.sandbox import TestCase
from asyncrl.errors import TaskError

# Reads the text of a test in a row, without running it, and makes it run all that it asserts.


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
        failed = [text.strip().splitlines()[-1] for _, text in result.failures + result.errors]
        assert not failed and not result.unexpectedSuccesses, failed[:1]
        ran += result.testsRun - len(result.skipped)
    assert ran, "no test ran"
_run({})
"""
PROGRAMS = ("solution", "solutions", "main", "program", "submission", "answer", "candidate", "your_module", "module")
"""Names of modules from which tests of data sets import the program."""
PYTEST = "pytest"  # A test that only starts it is run without it.
LACKING = "sandboxes have the program and Python's standard library only"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@lru_cache(maxsize=1024)  # Texts of tests of some batches: each sample reads them.
def asserted(source: str, entry: str, name: str) -> str:
    """Returns a test that runs all that it asserts: the text itself where it does. Raises TaskError where it asserts
    nothing, is no Python, or needs what sandboxes do not have. entry: the function that it is about, "" for unknown."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"the row's {name} is no Python: {error}") from None
    tree = ast.fix_missing_locations((meant := _Meant(entry)).visit(tree))
    if meant.lacking:
        raise TaskError(f"the row's {name} imports {meant.lacking[0]}: write the test without it, for {LACKING}")
    code = source if ast.dump(ast.parse(source)) == ast.dump(tree) else ast.unparse(tree)
    calls, run = _unrun(tree, entry)
    if entry and "candidate" in _names_of_program(code):
        code = f"candidate = {entry}\n{code}"
    code += "".join(f"\n{call}" for call in calls) + (RUN.replace("{}", ", ".join(run)) if run else "")
    if _names_of_program(code) and any(map(_asserts, _live(ast.parse(code))[0])):
        return code
    why = "asserts nothing of the program, so that every one passes: write asserts, or name its entry_point for `check`"
    raise TaskError(f"the row's {name} {why}, not {source!r:.80}")


class _Meant(ast.NodeTransformer):
    """Asserts comparisons that nothing reads, runs what runs as a script only, and takes from the program what a test
    imports from a module that stands for it. lacking: packages that are imported, unless the test can do without them.
    """

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self._modules = set[str]()
        self.lacking = list[str]()

    def visit_Expr(self, node: ast.Expr) -> Any:
        if ast.unparse(node.value).startswith(("unittest.main(", "pytest.main(")):
            return ast.Pass()
        self.generic_visit(node)
        return ast.Assert(node.value) if isinstance(node.value, ast.Compare | ast.BoolOp | ast.UnaryOp) else node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        return node.body if "__name__" in ast.unparse(node.test) else node

    def visit_Try(self, node: ast.Try) -> Any:
        before = list(self.lacking)
        self.generic_visit(node)
        self.lacking = before if node.handlers else self.lacking
        return node

    def visit_Import(self, node: ast.Import) -> Any:
        of_program = [each for each in node.names if self._is_program(each.name)]
        self._modules |= {each.asname or each.name for each in of_program}
        node.names = [each for each in node.names if each not in of_program and each.name != PYTEST]
        self.lacking += [each.name for each in node.names if not _is_pythons(each.name)]
        return node if node.names else ast.Pass()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        named = [each.name for each in node.names]
        module = node.module or ""
        is_programs = self._entry in named or any(map(self._is_program, (module, *named)))
        if not node.level and (_is_pythons(module) or not is_programs):
            self.lacking += [] if _is_pythons(module) else [module]
            return node
        self._modules |= {each.asname or each.name for each in node.names if self._is_program(each.name)}
        self.lacking += [f"{each}, a name of Python itself" for each in named if hasattr(builtins, each)]
        renamed = [each for each in node.names if each.asname not in (None, each.name, *self._modules)]
        return [ast.parse(f"{each.asname} = {each.name}").body[0] for each in renamed] or ast.Pass()

    def visit_Name(self, node: ast.Name) -> Any:
        self.lacking += [PYTEST] if node.id == PYTEST else []
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        return ast.Name(node.attr, node.ctx) if ast.unparse(node.value) in self._modules else node

    def _is_program(self, module: str) -> bool:
        return module.rpartition(".")[2] in {*PROGRAMS, self._entry} and not _is_pythons(module)


def _is_pythons(module: str) -> bool:
    """Returns whether a module is of the standard library."""
    return module.partition(".")[0] in sys.stdlib_module_names


def _unrun(tree: ast.Module, entry: str) -> tuple[list[str], list[str]]:
    """Returns the calls of checks, and the classes and functions with tests, that nothing in the test runs."""
    calls = []
    run = []
    for node in _live(tree)[1].values():
        needed = (
            [] if isinstance(node, ast.ClassDef) else node.args.args[: len(node.args.args) - len(node.args.defaults)]
        )
        if len(needed) == 1 and entry and (node.name == "check" or needed[0].arg == "candidate"):
            calls.append(f"{node.name}({entry})")
        elif not needed and (node.name.lower().startswith("test") or (isinstance(node, ast.ClassDef) and node.bases)):
            run.append(node.name)
    return calls, run


def _live(tree: ast.Module) -> tuple[list[ast.stmt], dict[str, Definition]]:
    """Returns the statements of a test that are run, and the functions and classes that none of them names."""
    waiting = {node.name: node for node in tree.body if isinstance(node, Definition) and node.name != "_run"}
    live: list[ast.stmt] = [node for node in tree.body if not isinstance(node, Definition)]
    for node in live:  # It grows.
        named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        live += [waiting.pop(each) for each in sorted(named & waiting.keys())]
    return live, waiting


def _names_of_program(code: str) -> set[str]:
    """Returns the names that a test reads, and that neither it nor Python has."""
    tables = [top := symtable.symtable(code, "test", "exec")]
    for table in tables:  # It grows.
        tables += table.get_children()
    own = {each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()}
    named = {each.get_name() for one in tables for each in one.get_symbols() if one is top or each.is_global()}
    return named - own - set(dir(builtins))


def _asserts(statement: ast.stmt) -> bool:
    """Returns whether a statement has an assertion that may fail."""
    nodes = list(ast.walk(statement))
    tests = [each.test for each in nodes if isinstance(each, ast.Assert) and not isinstance(each.test, ast.Tuple)]
    called = [ast.unparse(each.func).rpartition(".")[2] for each in nodes if isinstance(each, ast.Call)]
    fails = [each for each in called if each.startswith(("assert", "fail", "raises", "exit"))]
    fails += ["raise" for each in nodes if isinstance(each, ast.Raise)]
    return bool(fails) or any(isinstance(each, ast.Name) for test in tests for each in ast.walk(test))


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
