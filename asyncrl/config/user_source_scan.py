"""Finds mistakes in the user's source without running it, before anything is started.

Only certain mistakes count. `asyncrl.config.user_code.resolve` checks modules that make their names while they run.
"""

import ast
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from asyncrl.config.problems import Problem
from asyncrl.config.user_code import existing_file, no_module, source_and_name, suggestion
from asyncrl.errors import ConfigError

ONE_ARGUMENT = "a reward function is called with one argument, the sample (or the list of a group's samples)"
OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
MAKES_NAMES = {"__getattr__", "globals", "vars", "setattr", "exec", "eval"}
"""A module that uses or defines one of these may have names that no statement binds."""


def source_problem(spec: str, key: str) -> Problem | None:
    """Returns why the `FILE.py:NAME` or `module:NAME` of a key cannot be resolved, as far as its source shows it."""
    try:
        source, name = source_and_name(spec, key)
        if (path := _path_of(source, key)) is None:
            return None
        names = names_in(path.read_bytes())
    except ConfigError as mistake:
        return Problem.of_error(mistake, key)
    except (SyntaxError, ValueError) as error:
        return Problem(key, "", f"{path} is not valid Python: {error}")
    if names is None or name in names:
        return None
    near = suggestion(name, sorted(each for each in names if each[0] != "_"))
    return Problem(key, "", f"{source} has no {name}{near}")


def signature_problem(spec: str, options: Collection[str], key: str) -> Problem | None:
    """Returns why a function with one plain `def` cannot be called with one argument and `options`; else None."""
    source, name = source_and_name(spec, key)
    if (path := _path_of(source, key)) is None:
        return None
    function = _only_definition(name, ast.parse(path.read_bytes()).body)
    if function is None or not (mistake := _argument_mistake(function.args, options)):
        return None
    return Problem(key, "", f"{spec}: {ONE_ARGUMENT}, not as {name}({ast.unparse(function.args)}): {mistake}")


def _only_definition(name: str, body: Sequence[ast.stmt]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Returns the plain `def` of `name` if nothing else in a module's body binds that name."""
    bound = ((node, {name for inner in (node, *_of_top_level(node)) for name in _bound(inner)}) for node in body)
    match [node for node, names in bound if name in names]:
        case [ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]) as function]:
            return function
    return None


def _argument_mistake(arguments: ast.arguments, options: Collection[str]) -> str:
    """Returns what is wrong about a call with one positional argument and `options` by name; "" if it is right."""
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if not positional and arguments.vararg is None:
        return "it takes no argument"
    needed = positional[: len(positional) - len(arguments.defaults)][1:]
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    needed += [argument.arg for argument, default in by_name if default is None]
    missing = [name for name in needed if name not in options]
    return f"nothing is given for {', '.join(missing)}" if missing else ""


def _path_of(source: str, key: str) -> Path | None:
    """Returns the path of a file or module, None for a module without one; raises ConfigError if there is none."""
    if source.endswith(".py"):
        return existing_file(source, key)
    try:
        found = _find(source)
    except ModuleNotFoundError:
        raise no_module(source, key) from None
    return Path(str(found.origin)) if found is not None and (found.origin or "").endswith(".py") else None


def _find(module: str) -> ModuleSpec | None:
    """Finds a module as importlib does, but imports no parent package; None if a parent does not show where it is."""
    first, *rest = module.split(".")
    # Workers run as `python -m`, which puts the current folder first.
    spec = PathFinder.find_spec(first, [os.getcwd(), *sys.path]) or _search(first, None)
    for number in range(1, len(rest) + 1):
        if spec.submodule_search_locations is None:
            return None
        spec = _search(".".join([first, *rest[:number]]), spec.submodule_search_locations)
    return spec


def _search(module: str, folders: Sequence[str] | None) -> ModuleSpec:
    """Asks all finders, as `import` does; editable installations have finders of their own."""
    for finder in sys.meta_path:
        if (spec := finder.find_spec(module, folders)) is not None:
            return spec
    raise ModuleNotFoundError(module)


def names_in(source: bytes) -> set[str] | None:
    """Returns the names that a module binds at its top level; None if it may have any name. Raises SyntaxError or
    ValueError for a source that is not valid Python."""
    tree = ast.parse(source)
    if any(_makes_names(node) for node in ast.walk(tree)):
        return None
    inner = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    return inner.union(*map(_bound, _of_top_level(tree)))


def _makes_names(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return any(alias.name == "*" for alias in node.names)
    return getattr(node, "id", getattr(node, "name", None)) in MAKES_NAMES


def _of_top_level(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, OWN_SCOPE):
            yield from _of_top_level(child)


def _bound(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []
