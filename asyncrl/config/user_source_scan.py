"""What the user's source defines, read without running it: a mistake is told before anything is started.

Only certain mistakes count. A module that makes its names while it runs is left to `asyncrl.names.resolve`.
"""

import ast
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from asyncrl.names import suggestion

ONE_ARGUMENT = "a reward function is called with one argument, the sample (or the list of a group's samples)"
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


def signature_mistake(spec: str, options: Collection[str], where: str) -> str | None:
    """Why the function that `FILE.py:NAME` or `module:NAME` names cannot be called with one argument and `options`, as
    far as that can be told from its one plain `def` in the source; else None."""
    source, _, name = spec.rpartition(":")
    path = Path(source).expanduser().resolve() if source.endswith(".py") else _path_of(source)
    if path is None:
        return None
    function = _only_definition(name, ast.parse(path.read_bytes()).body)
    if function is None or not (wrong := _not_one(function.args, options)):
        return None
    return f"{where}: {spec}: {ONE_ARGUMENT}, not as {name}({ast.unparse(function.args)}): {wrong}"


def _only_definition(name: str, body: Sequence[ast.stmt]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The plain `def` of `name` where nothing else in a module's body binds it."""
    bound = ((node, {name for inner in (node, *_of_top_level(node)) for name in _bound(inner)}) for node in body)
    match [node for node, names in bound if name in names]:
        case [ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]) as function]:
            return function
    return None


def _not_one(arguments: ast.arguments, options: Collection[str]) -> str:
    """What is wrong about one positional argument and `options` by name; empty: nothing."""
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if not positional and arguments.vararg is None:
        return "it takes no argument"
    needed = positional[: len(positional) - len(arguments.defaults)][1:]
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    needed += [argument.arg for argument, default in by_name if default is None]
    missing = [name for name in needed if name not in options]
    return f"nothing is given for {', '.join(missing)}" if missing else ""


def _path_of(module: str) -> Path | None:
    try:
        found = _find(module)
    except ModuleNotFoundError:
        return None
    return Path(str(found.origin)) if found is not None and (found.origin or "").endswith(".py") else None


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
