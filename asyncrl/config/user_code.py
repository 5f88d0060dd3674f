"""Loads objects that the user names, `FILE.py:NAME` or `module:NAME`, and finds mistakes in them by reading alone."""

import ast
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Self

from asyncrl.config.problems import Problem
from asyncrl.errors import ConfigError

BUILTIN_TASKS = "asyncrl.tasks.builtin"
MOVED_TASKS = {"opening": "first_token"}
"""New names of built-in tasks, by their names in older versions."""

LISTED = 12
"""Names that an error message lists when it knows of none that is close."""

ONE_ARGUMENT = "a reward function is called with one argument, the sample (or the list of a group's samples)"
LIBRARIES = {"trl": "TRL's reward functions", "verl": "verl's reward functions"}
"""Names of functions of other libraries in messages, by the word before their names in `reward.functions`."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
PATTERNS = (ast.MatchAs, ast.MatchStar, ast.MatchMapping)
MOST_IMPORTED = 500
"""Files of its own folder that a file may import: each is read, kept and compared at every start of a run."""
MAKES_NAMES = {"__getattr__", "globals", "vars", "setattr", "exec", "eval"}
"""A module that uses or defines one of these may have names that no statement binds."""


def resolve(spec: str, where: str) -> Any:
    """Returns the object that `FILE.py:NAME` or `module:NAME` names; raises ConfigError, which begins with `where` and
    has the closest name, and errors of the user's file as they are. The folder of a file becomes importable."""
    source, name = _source_and_name(spec, where)
    module = module_named(source, where)
    if not hasattr(module, name):
        raise ConfigError(f"{where}: {source} has no {name}{suggestion(name, _own_names(module))}")
    return getattr(module, name)


def is_of_asyncrl(spec: str) -> bool:
    """Returns whether `FILE.py:NAME` or `module:NAME` names a part of asyncrl."""
    source = spec.partition(":")[0]
    return not source.endswith(".py") and source.partition(".")[0] == "asyncrl"


def _source_and_name(spec: str, where: str) -> tuple[str, str]:
    """Splits `FILE.py:NAME` or `module:NAME`; raises ConfigError when a part is missing."""
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ConfigError(f'{where}: "{spec}" names no function; write FILE.py:NAME or module:NAME')
    return source, name


def module_named(source: str, where: str) -> ModuleType:
    """Returns the module that `FILE.py` or `package.module` names; raises ConfigError as `resolve` does."""
    if source.endswith(".py"):
        return _module_of_file(_existing_file(source, where))
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not (source + ".").startswith(error.name + "."):
            raise
        raise _no_module(source, where) from None


def _existing_file(source: str, where: str) -> Path:
    """Returns the path of a user's file; raises ConfigError with the closest name when there is none."""
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        near = suggestion(path.name, [other.name for other in path.parent.glob("*.py")])
        raise ConfigError(f"{where}: there is no file {path}{near}")
    return path


def _no_module(name: str, where: str) -> ConfigError:
    """Returns the error about a module that does not exist; older versions of asyncrl had their tasks elsewhere."""
    package, _, task = name.rpartition(".")
    advice = "a file is written as FILE.py:NAME"
    if task == "ipynb":
        advice = f"{name} is a notebook, so put the function into a file that ends in .py"
    if package == "asyncrl.tasks":
        advice = f"the tasks of asyncrl are in {BUILTIN_TASKS}: write {BUILTIN_TASKS}.{MOVED_TASKS.get(task, task)}"
    return ConfigError(f"{where}: there is no module {name}; {advice}")


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function in messages and reward terms: its own name, or that of its class."""
    target = function.func if isinstance(function, partial) else function
    return str(getattr(target, "__name__", type(target).__name__)).strip("<>")


def suggestion(name: str, names: Iterable[str]) -> str:
    """Returns the end of an error message: the closest of `names`, or the first of them when none is close."""
    known = list(names)
    if near := difflib.get_close_matches(name, known, 1, 0.5):
        return f"; did you mean {near[0]}?"
    listed = ", ".join(known[:LISTED]) + (f" and {len(known) - LISTED} more" if len(known) > LISTED else "")
    return f"; there are {listed}" if known else ""


def _own_names(module: ModuleType) -> list[str]:
    """Returns the public names that a module defines itself, or all its public names if it defines none."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    named = type | FunctionType | BuiltinFunctionType
    own = [name for name, each in public.items() if not isinstance(each, named) or each.__module__ == module.__name__]
    return [name for name in own if not isinstance(public[name], ModuleType)] or list(public)


def _module_of_file(path: Path) -> ModuleType:
    name = f"asyncrl_user_{path.stem}_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    with ExitStack() as unless_loaded:
        unless_loaded.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        unless_loaded.pop_all()
    return module


def source_problem(
    spec: str, key: str, mistake: "Callable[[Parameters], str] | None" = None, calls: str = ONE_ARGUMENT
) -> Problem | None:
    """Returns why the `FILE.py:NAME` or `module:NAME` of a key cannot be resolved, as far as its source shows it.
    mistake: for a reward function, says what is wrong about the parameters of a plain `def`, "" for nothing. calls: how
    such a function is called."""
    try:
        source, name = _source_and_name(spec, key)
        if (path := _path_of(source, key)) is None:
            return None
        tree = ast.parse(path.read_bytes())
    except ConfigError as mistake:
        return Problem.of_error(mistake, key)
    except (SyntaxError, ValueError) as error:
        line = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        return Problem(key, "", f"{path} is not valid Python: {line}")
    names = names_in(tree)
    if names is not None and name not in names:
        near = suggestion(name, sorted(each for each in names if each[0] != "_"))
        return Problem(key, "", f"{source} has no {name}{near}")
    wrong = "" if mistake is None else _call_mistake(name, tree.body, mistake, calls)
    return Problem(key, "", f"{spec}: {wrong}") if wrong else None


def _call_mistake(name: str, body: Sequence[ast.stmt], mistake: "Callable[[Parameters], str]", calls: str) -> str:
    """Returns why `name` cannot be called as a reward function, if nothing else in a module's body binds it."""
    bound = ((node, {name for inner in (node, *_of_top_level(node)) for name in _bound(inner)}) for node in body)
    match [node for node, names in bound if name in names]:
        case [
            ast.FunctionDef(decorator_list=[], args=arguments)
            | ast.AsyncFunctionDef(decorator_list=[], args=arguments)
            | ast.Assign(targets=[ast.Name()], value=ast.Lambda(args=arguments))
        ]:
            wrong = mistake(Parameters.of(arguments))
            return f"{calls}, not as {name}({ast.unparse(arguments)}): {wrong}" if wrong else ""
        case [ast.ClassDef(decorator_list=[], bases=[], body=inner)] if "__call__" in _methods(inner):
            return f"a class is no function: name an object of it, in the file `score = {name}()`, or a function"
        case [ast.Assign(targets=[ast.Name()], value=ast.Constant(value=value))]:
            return f"it is {value!r:.50}, and not a function"
    return ""


def _methods(body: Sequence[ast.stmt]) -> set[str]:
    return {each.name for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def missing_import(spec: str, key: str) -> Problem | None:
    """Returns a package or module that the file of `FILE.py:NAME` imports at its top and that is not installed."""
    path = Path(spec.rpartition(":")[0]).expanduser()
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    if any(isinstance(node, ast.Attribute) and node.attr == "path" for node in ast.walk(tree)):
        return None  # It may extend sys.path.
    for node in tree.body:
        named = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        named += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for name in (each.partition(".")[0] for each in named):
            if not _is_importable(name, path.resolve().parent):
                text = f"{path}, line {node.lineno}, imports {name}, which is not installed here"
                return Problem(key, "", f"{text}; run: {sys.executable} -m pip install PACKAGE")
    return None


def _is_importable(name: str, folder: Path) -> bool:
    if name in sys.modules or PathFinder.find_spec(name, [str(folder), os.getcwd(), *sys.path]) is not None:
        return True
    try:
        _search(name, None)
    except (ImportError, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a function. named: all that have a name, in order. needed: those without a default. positional:
    number of those that may be given by place. takes_any: whether it takes arguments by any name. by_place: those that
    have to be given by place."""

    named: tuple[str, ...]
    needed: tuple[str, ...]
    positional: int
    takes_any: bool
    by_place: tuple[str, ...] = ()

    @classmethod
    def of(cls, arguments: ast.arguments) -> Self:
        """Reads the parameters of a `def` or a `lambda`."""
        positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        needed = positional[: len(positional) - len(arguments.defaults)]
        by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        needed += [argument.arg for argument, default in by_name if default is None]
        named = (*positional, *(argument.arg for argument in arguments.kwonlyargs))
        number = len(positional) + (arguments.vararg is not None)
        by_place = tuple(argument.arg for argument in arguments.posonlyargs if argument.arg in needed)
        return cls(named, tuple(needed), number, arguments.kwarg is not None, by_place)


def one_argument_mistake(options: Collection[str], found: Parameters) -> str:
    """Returns what is wrong about a call with one positional argument and `options` by name; "" if it is right."""
    if library := library_of(found.named, takes_any=found.takes_any):
        return f"it is one of {LIBRARIES[library]}: write {library}: before its name"
    if not found.positional:
        return "it takes no argument"
    missing = [name for name in found.needed if name not in options and name != found.named[0]]
    return f"nothing is given for {', '.join(missing)}" if missing else ""


def parameters_in(spec: str) -> Parameters | None:
    """Returns the parameters of the function that `FILE.py:NAME` names; None where its source does not show them."""
    found: list[Parameters] = []
    source_problem(spec, "", lambda parameters: found.append(parameters) or "")  # type: ignore[func-returns-value]
    return found[0] if found else None


def outline_of(spec: str) -> Any:
    """Returns a class with the names of the class that `FILE.py:NAME` names and empty methods of its parameters, or a
    function for a `def`; None where the source does not show all of it, such as what it inherits."""
    source, name = _source_and_name(spec, "")
    path = _path_of(source, "")
    body = [] if path is None else ast.parse(path.read_bytes()).body
    match [node for node in body if any(name in _bound(inner) for inner in (node, *_of_top_level(node)))]:
        case [ast.ClassDef(decorator_list=[], bases=[], keywords=[], body=inner) as found]:
            found.body = [part for each in inner for part in _emptied(each)]
        case [ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[])]:
            return lambda: None
        case _:
            return None
    made: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(ast.Module([found], [])), str(path), "exec"), made)
    return made[name]


def _emptied(node: ast.stmt) -> list[ast.stmt]:
    """Returns a method of the same parameters that does nothing. What else binds names binds functions of any
    arguments: nothing of the user's code is left."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        names = ast.unparse(_without_values(node.args))
        return ast.parse(f"def {node.name}({names}): ...").body
    bound = {name for inner in (node, *_of_top_level(node)) for name in _bound(inner)}
    return ast.parse("".join(f"def {name}(*given, **named): ...\n" for name in sorted(bound)) or "pass").body


def _without_values(arguments: ast.arguments) -> ast.arguments:
    """Returns parameters without annotations, and with None for each default."""
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [each and ast.Constant(None) for each in arguments.kw_defaults]
    return arguments


def library_of(parameters: Sequence[str], *, takes_any: bool) -> str:
    """Returns the library that a reward function with these parameters was written for, `trl` or `verl`; "" for ours.
    takes_any: whether it takes further arguments by any name."""
    if "completions" in parameters and (takes_any or len(parameters) > 1):
        return "trl"
    return "verl" if "solution_str" in parameters else ""


def _path_of(source: str, key: str) -> Path | None:
    """Returns the path of a file or module, None for a module without one; raises ConfigError if there is none."""
    if source.endswith(".py"):
        return _existing_file(source, key)
    try:
        found = _find(source)
    except ModuleNotFoundError:
        raise _no_module(source, key) from None
    return Path(str(found.origin)) if found is not None and (found.origin or "").endswith(".py") else None


def file_of_module(module: str) -> Path | None:
    """Returns the file of a module without importing it; None when there is none."""
    try:
        found = _find(module)
    except (ImportError, ValueError):
        return None
    return Path(str(found.origin)).resolve() if found is not None and (found.origin or "").endswith(".py") else None


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


def names_in(tree: ast.Module) -> set[str] | None:
    """Returns the names that a module binds at its top level; None if it may have any name."""
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
        if not isinstance(child, (*DEFINITIONS, ast.Lambda)):
            yield from _of_top_level(child)


def _bound(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) else []
    name = getattr(node, "rest" if isinstance(node, ast.MatchMapping) else "name", None)
    return [name] if name and isinstance(node, (*DEFINITIONS, *PATTERNS)) else []


def importable_name(function: Callable[..., Any]) -> str | None:
    """Returns `module:function` if another process finds this very function under that name, else None."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "")
    if module in (None, "__main__") or "." in name:  # Importing a script would run it again.
        return None
    found = getattr(sys.modules.get(module), name, None)
    return f"{module}:{name}" if found is function else None


def imported_files(file: Path, root: Path) -> list[Path]:
    """Returns the files in the folder of `file` that its `import` statements name, and those of these files, without
    importing any. root: folder in which the names of modules begin. Raises ConfigError for more than MOST_IMPORTED."""
    found = {file: None}
    unread = [file]
    while unread:
        reading = unread.pop(0)
        for each in _named_by_imports(reading, root):
            if each not in found and each.is_relative_to(file.parent):
                found[each] = None
                unread.append(each)
        if len(found) > MOST_IMPORTED:
            raise ConfigError(
                f"{file} imports more than {MOST_IMPORTED} files of its own folder, which are compared at each start "
                "of the run: install them as a package, or keep the file in a folder of its own"
            )
    return list(found)[1:]


def _named_by_imports(file: Path, root: Path) -> Iterator[Path]:
    """Yields the files that exist for the modules in the `import` statements of a file; none if it is no Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # What is wrong with it is said where it is imported.
    for statement in ast.walk(tree):
        match statement:
            case ast.Import(names):
                for each in names:
                    yield from _files_of(root, each.name.split("."))
            case ast.ImportFrom(module, names, level):
                folder = file.parents[level - 1] if level else root
                for each in names:
                    yield from _files_of(folder, [*(module or "").split("."), each.name] if module else [each.name])


def _files_of(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yields the file of a module in `folder`, and those of the packages that it is in. As in Python, a package is
    found before a file of the same name."""
    if names[0] == "asyncrl":
        return
    for number in range(1, len(names) + 1):
        place = folder.joinpath(*names[:number])
        file = next((each for each in (place / "__init__.py", Path(f"{place}.py")) if each.is_file()), None)
        if file is not None:
            yield file
        elif not place.is_dir():
            return
