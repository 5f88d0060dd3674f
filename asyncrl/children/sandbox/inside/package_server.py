"""Has functions of packages read a model's text, one answer after the other, over a socket from the pool.

    first process: imports the packages ── fork ──> serves answers: a text that a package evaluates is data, or refused
                                                          └─ fork ──> one answer with more than numbers and symbols

Packages evaluate text as Python. Here `eval` takes what holds no name but those of mathematics, and neither reads an
attribute nor makes a function. An answer that names more than numbers and symbols are made of is read once more in a
fresh copy of the interpreter, which ends with it: what it may change meets no other answer.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

from asyncrl.children.sandbox.inside.first_process import FOUND, WRITABLE, describe

EVALUATE = builtins.eval
EXECUTE = builtins.exec
IMPORTS = {"importlib._bootstrap", "_frozen_importlib"}
OF_LIBRARIES = {"collections", "dataclasses", "sympy.polys.monomials", *IMPORTS}
"""Modules that execute what they wrote themselves, of no text that anybody gave them."""
NUMBERS = ("Integer", "Float", "Rational", "Symbol", "Add", "Mul", "Pow")
"""Names of sympy that numbers, fractions and polynomials are made of."""
HARMLESS = (abs, round, pow, sum, min, max, divmod)
READY: list[str] = []
"""One text, once the packages are imported: "ready", or why they could not be."""
NAMES_OF_SYMPY = re.compile(r"from sympy import \*")


class Evaluations:
    """Stands for `eval` and `exec` while a package reads a text. alone: in an interpreter that ends with the answer.
    refused: a text was evaluated that is no data here."""

    def __init__(self, alone: bool) -> None:
        self.refused = False
        sympy = sys.modules.get("sympy")
        self._numbers = [getattr(sympy, name) for name in NUMBERS] if sympy else []
        self._kinds: tuple[type, ...] = (sympy.Basic,) if sympy and alone else ()
        self._values = (sympy.Symbol, sympy.Number, *self._kinds) if sympy else ()
        self._functions = (*HARMLESS, sympy.sqrt, sympy.cbrt, sympy.root) if sympy and alone else HARMLESS

    def evaluate(self, source: Any, names: Any = None, local: Any = None, /) -> Any:
        """Stands for `eval`; raises ValueError for code."""
        if is_of_library():
            return EVALUATE(source, names, local)
        code = source if isinstance(source, CodeType) else compile(str(source).strip(), "answer", "eval")
        known = {**(names or {}), **(local or {})}
        if any(isinstance(each, CodeType) for each in code.co_consts) or not all(
            name in known and self._is_data(known[name]) for name in code.co_names
        ):
            self.refuse()
        return EVALUATE(code, {"__builtins__": {}} if names is None else names, local)

    def execute(self, source: Any, names: Any = None, local: Any = None, /, **options: Any) -> None:
        """Stands for `exec`; raises ValueError for what no library wrote itself."""
        if not is_of_library() and not (isinstance(source, str) and NAMES_OF_SYMPY.fullmatch(source)):
            self.refuse()
        EXECUTE(source, names, local, **options)

    def refuse(self) -> None:
        self.refused = True
        raise ValueError("it is code, and no value")

    def _is_data(self, value: Any) -> bool:
        if isinstance(value, type):
            return any(value is each for each in self._numbers) or issubclass(value, self._kinds)
        return isinstance(value, self._values) or any(value is each for each in self._functions)

    @contextmanager
    def installed(self) -> Iterator[None]:
        builtins.eval = self.evaluate
        builtins.exec = self.execute
        try:
            yield
        finally:
            builtins.eval = EVALUATE
            builtins.exec = EXECUTE


def is_of_library() -> bool:
    """Returns whether a library evaluates what it wrote itself: one of OF_LIBRARIES, or any while it is imported."""
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") in OF_LIBRARIES:
        return True
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") in IMPORTS:
            return True
    return False


def prepare(case: dict[str, Any]) -> None:
    """Imports functions and packages in the first process, once for all copies of it."""
    request = json.loads(case["source"])
    if READY:
        return
    try:
        sys.path += request["paths"]
        for name in (request["module"], *request["packages"]):
            importlib.import_module(name)
        FOUND.update(*map(os.listdir, WRITABLE))  # Caches of packages.
        READY.append("ready")
        gc.collect()
        gc.freeze()  # Copies of the process share what no collector writes to.
    except Exception as error:  # Of a package.
        READY.append(describe(error))


def run(case: dict[str, Any], link: int, note: int) -> None:
    """Answers until the pool closes the socket."""
    connection = socket.socket(fileno=link)
    connection.sendall(json.dumps(READY[0]).encode() + b"\n")
    readers: Mapping[str, Callable[[str], Callable[[str], Any]]]
    readers = sys.modules[json.loads(case["source"])["module"]].READERS
    for line in connection.makefile("rb"):
        name, wanted, text = json.loads(line)
        connection.sendall(json.dumps(answer_of(readers[name], wanted, text)).encode() + b"\n")


def answer_of(reader: Callable[[str], Callable[[str], Any]], wanted: str, text: str) -> list[Any]:
    """Returns ["value", value], or ["row" or "error", why]. wanted: what the row has, which is nobody's answer."""
    try:
        read = reader(wanted)
    except Exception as error:  # Of a package.
        return ["row", describe(error)]
    evaluations = Evaluations(alone=False)
    found = attempt(read, text, evaluations)
    return alone(read, text) if evaluations.refused else found


def attempt(read: Callable[[str], Any], text: str, evaluations: Evaluations) -> list[Any]:
    try:
        with evaluations.installed():
            return ["value", read(text)]
    except BaseException as error:  # Of a package, at any text: MemoryError and RecursionError among them.
        return ["error", describe(error)[:500]]


def alone(read: Callable[[str], Any], text: str) -> list[Any]:
    """Reads a text in a copy of this process, which ends with it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.closerange(3, writing)  # The answers' own way out among them.
        try:
            os.write(writing, json.dumps(attempt(read, text, Evaluations(alone=True))).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answers:
        found = answers.read()
    _, status = os.waitpid(child, 0)
    ended = f"its process ended with status {os.waitstatus_to_exitcode(status)}"
    return list(json.loads(found)) if found else ["error", ended]
