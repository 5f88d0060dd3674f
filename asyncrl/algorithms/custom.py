"""A page of the user's own: found by its name, checked before anything starts, and blamed for what its code raises."""

import inspect
import os
import sys
import traceback
from dataclasses import dataclass
from functools import wraps
from types import ModuleType, TracebackType
from typing import Any

from asyncrl.controller import Controller, Page
from asyncrl.errors import AsyncrlError, ConfigError, PageError, first
from asyncrl.fleet import Fleet
from asyncrl.names import module_named, resolve
from asyncrl.rolling import Attempt

KEY = "algorithm.page"
FROM_PYTHON = "python:page"
"""What `algorithm.page` says in the config of a run whose page has no name to import it by."""
ARGUMENTS = {"roll_out": ("fleet", "gate", "group"), "train": ("fleet", "gate")}
"""What each function of a page is called with."""


def page_named(name: str) -> Page:
    """The page that `module:NAME` or `FILE.py:NAME` names, or a module or file with both functions.

    Raises:
        ConfigError: there is none, or it is no page; the message says what to write.
    """
    if name == FROM_PYTHON:
        raise ConfigError(
            f"{KEY}: the run was started from Python with a page that cannot be imported: resume it with the same call"
        )
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)  # Workers find modules there, and so must who starts them.
    found = resolve(name, KEY) if ":" in name else module_named(name, KEY)
    return page_from(found, f"{KEY} = {name}")


def page_from(given: Any, where: str) -> Page:
    """The page that a `Page`, or a module or object with its two functions, is. where: what messages begin with.

    Raises:
        ConfigError: a function is missing, is not async or takes other arguments.
    """
    if mistakes := [mistake for name in ARGUMENTS if (mistake := _mistake(given, name))]:
        raise ConfigError(f"{where} is no page: {_instead(given) or '; '.join(mistakes)}")
    return given if isinstance(given, Page) else Page(given.roll_out, given.train)


def _instead(given: object) -> str:
    """What to write where the whole is of the wrong kind; empty: it is not."""
    if inspect.isroutine(given):
        return "it is one function, and a page has two, write `asyncrl.Page(roll_out, train)`"
    if inspect.isclass(given) and all(callable(getattr(given, name, None)) for name in ARGUMENTS):
        return f"it is a class, give an instance, write `{given.__name__}(...)`"
    return ""


def importable_page(given: object) -> str | None:
    """The name under which this very page can be imported elsewhere; None: a script's, a notebook's, a local one."""
    if isinstance(given, ModuleType):
        return given.__name__ if sys.modules.get(given.__name__) is given and _importable(given.__name__) else None
    made_by = (getattr(given, "__module__", None), getattr(getattr(given, "roll_out", None), "__module__", None))
    for module in [str(module) for module in made_by if _importable(module)]:
        names = [name for name, value in vars(sys.modules[module]).items() if value is given]
        if names:
            return f"{module}:{names[0]}"
    return None


def _importable(module: str | None) -> bool:
    return module in sys.modules and module != "__main__" and sys.modules[module].__spec__ is not None


def _mistake(given: object, name: str) -> str:
    """What is wrong with one function of a page; empty: nothing."""
    function, arguments = getattr(given, name, None), ", ".join(ARGUMENTS[name])
    write = f"write `async def {name}({arguments})`"
    if not callable(function):
        return f"it has no function {name}, {write}"
    if not _is_async(function):
        kind = "yields" if inspect.isasyncgenfunction(function) else "is not async"
        return f"its {name} {kind}, {write}"
    signature = inspect.signature(function)
    try:
        signature.bind(*ARGUMENTS[name])
    except TypeError:
        return f"its {name} takes ({', '.join(signature.parameters)}) and is called with ({arguments}), {write}"
    return ""


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def blamed(page: Page, name: str) -> Page:
    """The same page; what its own code raises, and what it leaves undone, is a PageError that says where."""

    @wraps(page.roll_out)
    async def roll_out(fleet: Fleet, gate: Controller, group: Attempt) -> None:
        with _Blame(f"roll_out of {name}", _file_of(page.roll_out)):
            await page.roll_out(fleet, gate, group)
        if undone := gate.undone(group):
            raise PageError(f"roll_out of {name} returned although {undone}")

    @wraps(page.train)
    async def train(fleet: Fleet, gate: Controller) -> None:
        with _Blame(f"train of {name}", _file_of(page.train)):
            await page.train(fleet, gate)
        if not gate.over:
            raise PageError(
                f"train of {name} returned at version {gate.version}, before `gate.iterations()` had ended: write "
                "`async for iteration in gate.iterations()` without leaving the loop"
            )

    return Page(roll_out, train)


def _file_of(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_filename if code is not None else ""


@dataclass(frozen=True, slots=True)
class _Blame:
    """Errors of asyncrl itself, and timeouts, pass: a lost worker is no fault of the page."""

    what: str
    file: str

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            return
        cause = first(error)
        if isinstance(cause, PageError):
            raise PageError(f"{self.what}: {cause}{self._place(cause)}") from cause
        if isinstance(cause, Exception) and not isinstance(cause, AsyncrlError | TimeoutError):
            raise PageError(f"{self.what} raised {type(cause).__name__}: {cause}{self._place(cause)}") from cause

    def _place(self, cause: Exception) -> str:
        frames = traceback.extract_tb(cause.__traceback__)
        of_the_page = [frame for frame in frames if frame.filename == self.file] or frames[-1:]
        return f" ({of_the_page[-1].filename}, line {of_the_page[-1].lineno})" if of_the_page else ""
