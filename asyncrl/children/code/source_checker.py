"""Compiles Python sources and looks for mistakes of style, without running them. This file is itself a program that a
sandbox runs: stdin has the sources as a JSON list, and each gets a line of JSON on stdout as soon as it is checked. Of
several, one that takes long or ends its process has the line `null`: it is to be checked alone."""

import ast
import builtins
import json
import os
import signal
import symtable
import sys
import tokenize
import warnings
from collections.abc import Iterator
from io import StringIO

FILE = "program.py"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LOOPS = (ast.For, ast.AsyncFor, ast.comprehension)
ENDS = (ast.Return, ast.Raise, ast.Break, ast.Continue)
WITHOUT_EFFECT = (ast.BinOp, ast.BoolOp, ast.Compare, ast.Constant, ast.Name, ast.UnaryOp, ast.Lambda)
MUTABLE = (ast.List, ast.Dict, ast.Set)
OF_MODULES = {"__file__", "__name__", "__doc__", "__builtins__", "__spec__", "__package__", "__loader__"}
ANY_NAME = {"exec", "eval", "globals", "locals", "vars"}
"""A program that uses one of these may bind and read names that no statement shows."""
MOST_FINDINGS = 20
SHARE = 0.1
"""Seconds of CPU time that one of several sources has; a usual one takes a few thousandths."""


def checked(source: str) -> dict[str, object]:
    """Returns whether the source compiles, else why not; with the findings of a linter."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            compile(source, FILE, "exec", dont_inherit=True)
            tree = ast.parse(source)
        except SyntaxError as error:
            where = f" (line {error.lineno})" if error.lineno else ""
            return {"error": f"{type(error).__name__}: {error.msg}{where}", "findings": []}
        except (ValueError, MemoryError, RecursionError, OverflowError) as error:
            return {"error": f"{type(error).__name__}: {error}", "findings": []}
    found = [f"line {each.lineno}: {each.message}" for each in warned if each.category is not DeprecationWarning]
    try:
        found += [*of_tokens(source), *of_tree(tree), *of_names(source, tree)]
    except RecursionError:
        found.append("it is nested too deeply to be read")
    return {"error": "", "findings": list(dict.fromkeys(found))[:MOST_FINDINGS]}


def of_tokens(source: str) -> Iterator[str]:
    """Yields semicolons at the ends of lines."""
    before = tokenize.TokenInfo(tokenize.NEWLINE, "", (0, 0), (0, 0), "")
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.NEWLINE, tokenize.NL) and before.string == ";":
            yield f"line {before.start[0]}: a semicolon ends the line"
        before = token


def of_tree(tree: ast.Module) -> Iterator[str]:
    """Yields what single statements and expressions do wrong."""
    for node in ast.walk(tree):
        yield from (f"line {getattr(node, 'lineno', 1)}: {finding}" for finding in of_node(node))
        for block in (getattr(node, "body", None), getattr(node, "orelse", None), getattr(node, "finalbody", None)):
            if isinstance(block, list):
                yield from of_block(block, isinstance(node, (ast.Module, *DEFINITIONS)))


def of_node(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ExceptHandler(type=None):
            yield "a bare `except` catches everything"
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            if any(isinstance(each, MUTABLE) for each in (*node.args.defaults, *node.args.kw_defaults)):
                yield "a default value is mutable, and calls share it"
        case ast.Compare(ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(value=None)]):
            yield "None is compared with `==`, not with `is`"
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda()):
            yield f"the lambda {name} should be a function"
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            yield "an import of `*` hides which names there are"
        case ast.JoinedStr(values=values) if not any(isinstance(each, ast.FormattedValue) for each in values):
            yield "an f-string has nothing to fill in"
        case ast.Assert(test=ast.Tuple(elts=[_, *_])):
            yield "an assertion of a tuple always holds"


def of_block(block: list[ast.stmt], may_begin_with_text: bool) -> Iterator[str]:
    """Yields statements of a block that are never reached, or do nothing."""
    for number, statement in enumerate(block):
        if number and isinstance(block[number - 1], ENDS):
            yield f"line {statement.lineno}: it is never reached"
        if not isinstance(statement, ast.Expr) or not isinstance(statement.value, WITHOUT_EFFECT):
            continue
        value = getattr(statement.value, "value", None)
        if value is not ... and not (isinstance(value, str) and number == 0 and may_begin_with_text):
            yield f"line {statement.lineno}: it has no effect"


def of_names(source: str, tree: ast.Module) -> Iterator[str]:
    """Yields names that nothing defines, and imports and local variables that nothing reads."""
    table = symtable.symtable(source, FILE, "exec")
    everything = list(tables(table))
    read = {each.get_name() for one in everything for each in one.get_symbols() if each.is_referenced()}
    if read & ANY_NAME or any(
        isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree)
    ):
        return
    bound = {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}
    bound |= {each.get_name() for one in everything for each in one.get_symbols() if assigned_global(each)}
    bound |= {each.get_name() for each in table.get_symbols() if each.is_namespace()}
    read |= {each.id for node in ast.walk(tree) if isinstance(node, LOOPS) for each in names_of(node.target)}
    for one in everything:
        for symbol in one.get_symbols():
            name = symbol.get_name()
            is_global = one is table or symbol.is_global()
            if symbol.is_referenced() and is_global and name not in bound | set(dir(builtins)) | OF_MODULES:
                yield f"nothing defines the name {name}"
            if symbol.is_imported() and name not in read:
                yield f"nothing reads the import {name}"
            if one.get_type() == "function" and name not in read and is_variable(symbol):
                yield f"nothing reads the variable {name}"


def tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from tables(child)


def assigned_global(symbol: symtable.Symbol) -> bool:
    return symbol.is_declared_global() and symbol.is_assigned()


def is_variable(symbol: symtable.Symbol) -> bool:
    """Returns whether a function assigns this name, which is none of its parameters, nor meant to be left unread."""
    is_assigned = symbol.is_local() and symbol.is_assigned() and not symbol.is_imported()
    return is_assigned and not symbol.is_parameter() and not symbol.get_name().startswith("_")


def names_of(target: ast.AST) -> Iterator[ast.Name]:
    return (node for node in ast.walk(target) if isinstance(node, ast.Name))


def apart(source: str) -> str:
    """Checks a source in a process of its own, for SHARE of CPU time; returns its line, or that of none."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.setitimer(signal.ITIMER_PROF, SHARE)  # Its signal ends a process inside Python's compiler too.
            os.close(reading)
            with open(writing, "w") as answer:
                answer.write(json.dumps(checked(source)))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as lines:
        line = lines.read()
    _, status = os.waitpid(child, 0)
    return line if line and not status else "null"


def main() -> None:
    """Checks all sources of stdin: a single one here, several each in a process of its own."""
    sources = json.loads(sys.stdin.buffer.read().decode(errors="surrogatepass"))
    for source in sources:
        sys.stdout.write((apart(source) if len(sources) > 1 else json.dumps(checked(source))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
