"""Reads the text of a test in a row, without running it: what of it is run, and whether that asserts anything."""

import ast
import builtins
import symtable

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def live_and_waiting(tree: ast.Module) -> tuple[list[ast.stmt], dict[str, Definition]]:
    """Returns the statements of a test that are run, and the functions and classes that none of them names."""
    waiting = {node.name: node for node in tree.body if isinstance(node, Definition) and node.name != "_run"}
    live: list[ast.stmt] = [node for node in tree.body if not isinstance(node, Definition)]
    for node in live:  # It grows.
        named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        live += [waiting.pop(each) for each in sorted(named & waiting.keys())]
    return live, waiting


def names_of_program(code: str) -> set[str]:
    """Returns the names that a test reads, and that neither it nor Python has."""
    tables = [top := symtable.symtable(code, "test", "exec")]
    for table in tables:  # It grows.
        tables += table.get_children()
    own = {each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()}
    named = {each.get_name() for one in tables for each in one.get_symbols() if one is top or each.is_global()}
    return named - own - set(dir(builtins))


def asserts(statement: ast.stmt) -> bool:
    """Returns whether a statement has an assertion that may fail."""
    nodes = list(ast.walk(statement))
    tests = [each.test for each in nodes if isinstance(each, ast.Assert) and not isinstance(each.test, ast.Tuple)]
    called = [ast.unparse(each.func).rpartition(".")[2] for each in nodes if isinstance(each, ast.Call)]
    fails = [each for each in called if each.startswith(("assert", "fail", "raises", "exit"))]
    fails += ["raise" for each in nodes if isinstance(each, ast.Raise)]
    return bool(fails) or any(isinstance(each, ast.Name) for test in tests for each in ast.walk(test))
