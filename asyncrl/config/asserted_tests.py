"""Reads the text of a test in a row, without running it, and makes it run all that it asserts."""

import ast
import builtins
import symtable
import sys
from functools import lru_cache
from typing import Any

from asyncrl.errors import TaskError

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
