"""What the user's source defines, read without running it: a mistake is told before anything is started.

Only certain mistakes count. A module that makes its names while it runs is left to `asyncrl.names.resolve`.
"""

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from asyncrl.names import suggestion

OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
MAKES_NAMES = {"__getattr__", "globals", "vars", "setattr", "exec", "eval"}
"""Used or defined in a module, names can be there that no statement binds."""


def mistake_in(spec: str, where: str) -> str | None:
    """Why `FILE.py:NAME` or `module:NAME` cannot be resolved, as far as that can be told from the source; else None.

    where: what the message begins with.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        return f'{where}: "{spec}" names no function; write FILE.py:NAME or module:NAME'
    if source.endswith(".py"):
        return _mistake_in_file(Path(source).expanduser().resolve(), source, name, where)
    return _mistake_in_module(source, name, where)


def _mistake_in_file(path: Path, source: str, name: str, where: str) -> str | None:
    if not path.is_file():
        near = suggestion(path.name, [other.name for other in path.parent.glob("*.py")])
        return f"{where}: there is no file {path}{near}"
    try:
        names = names_in(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        return f"{where}: {path} is no Python that can be read: {error}"
    if names is None or name in names:
        return None
    return f"{where}: {source} has no {name}{suggestion(name, sorted(each for each in names if each[0] != '_'))}"


def _mistake_in_module(module: str, name: str, where: str) -> str | None:
    try:
        found = _find(module)
    except ModuleNotFoundError:
        return f"{where}: there is no module {module}; a file is written as FILE.py:NAME"
    if found is None or not (found.origin or "").endswith(".py"):
        return None
    return _mistake_in_file(Path(str(found.origin)), module, name, where)


def _find(module: str) -> ModuleSpec | None:
    """Unlike importlib's own search it imports no parent.

    Returns:
        None when a parent says in no way that can be read here where its parts lie.

    Raises:
        ModuleNotFoundError: it is nowhere.
    """
    first, *rest = module.split(".")
    # Workers run as `python -m`, which puts the current folder first.
    spec = PathFinder.find_spec(first, [os.getcwd(), *sys.path]) or _search(first, None)
    for number in range(1, len(rest) + 1):
        if spec.submodule_search_locations is None:
            return None
        spec = _search(".".join([first, *rest[:number]]), spec.submodule_search_locations)
    return spec


def _search(module: str, folders: Sequence[str] | None) -> ModuleSpec:
    """As `import` does, through all finders, which those of editable installations are among."""
    for finder in sys.meta_path:
        if (spec := finder.find_spec(module, folders)) is not None:
            return spec
    raise ModuleNotFoundError(module)


def names_in(source: bytes) -> set[str] | None:
    """What a module's statements bind at its top level; None: it may have any name.

    Raises:
        SyntaxError, ValueError: it is no Python.
    """
    tree = ast.parse(source)
    if any(_anything(node) for node in ast.walk(tree)):
        return None
    inner = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    return inner.union(*map(_bound, _of_top_level(tree)))


def _anything(node: ast.AST) -> bool:
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
