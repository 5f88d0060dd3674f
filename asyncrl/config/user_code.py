"""Loads objects that the user names: `FILE.py:NAME` or `module:NAME`."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from asyncrl.errors import ConfigError

BUILTIN_TASKS = "asyncrl.tasks.builtin"
MOVED_TASKS = {"opening": "first_token"}
"""New names of built-in tasks, by their names in older versions."""

LISTED = 12
"""Names that an error message lists when it knows of none that is close."""


def resolve(spec: str, where: str) -> Any:
    """Returns the object that `FILE.py:NAME` or `module:NAME` names.

    where: beginning of error messages. The folder of a file becomes importable, as it is for a script.

    Raises:
        ConfigError: there is no such file, module or name; the message has the closest name that exists. Errors in
            the file itself are raised as they are.
    """
    source, name = source_and_name(spec, where)
    module = module_named(source, where)
    if not hasattr(module, name):
        raise ConfigError(f"{where}: {source} has no {name}{suggestion(name, _own_names(module))}")
    return getattr(module, name)


def source_and_name(spec: str, where: str) -> tuple[str, str]:
    """Splits `FILE.py:NAME` or `module:NAME`; raises ConfigError when a part is missing."""
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ConfigError(f'{where}: "{spec}" names no function; write FILE.py:NAME or module:NAME')
    return source, name


def module_named(source: str, where: str) -> ModuleType:
    """Returns the module that `FILE.py` or `package.module` names; raises ConfigError as `resolve` does."""
    if source.endswith(".py"):
        return _module_of_file(existing_file(source, where))
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not (source + ".").startswith(error.name + "."):
            raise
        raise no_module(source, where) from None


def existing_file(source: str, where: str) -> Path:
    """Returns the path of a user's file; raises ConfigError with the closest name when there is none."""
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        near = suggestion(path.name, [other.name for other in path.parent.glob("*.py")])
        raise ConfigError(f"{where}: there is no file {path}{near}")
    return path


def no_module(name: str, where: str) -> ConfigError:
    """Returns the error about a module that does not exist; older versions of asyncrl had their tasks elsewhere."""
    package, _, task = name.rpartition(".")
    advice = "a file is written as FILE.py:NAME"
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
    own = []
    for name, value in public.items():
        is_elsewhere = (
            isinstance(value, type | FunctionType | BuiltinFunctionType) and value.__module__ != module.__name__
        )
        if not is_elsewhere and not isinstance(value, ModuleType):
            own.append(name)
    return own or list(public)


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
