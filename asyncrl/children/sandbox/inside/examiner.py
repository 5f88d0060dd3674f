"""Runs the code of a test in a sandbox of its own, where no program ever runs. Names that neither the test nor Python
has are those of the program: calling one sends the arguments to the sandbox of the program, and a plain value, or an
error, comes back. So nothing that a program changes in its own interpreter takes part in a comparison.

A call of a function answers plain values, or an iterator of Python's own: an object of the program's class would say
what its program likes to `in`, `startswith` and whatever else a test asks. What a class of the program makes, by its
name in CapWords, is an object, and so is everything in a test that says so.
"""

import builtins
import json
import marshal
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

from asyncrl.children.sandbox.inside.first_process import describe

LARGEST = 64 * 2**20
"""Bytes that an answer may announce, whatever the limit of the case is."""


class Forged(BaseException):
    """The program answered what no call returns."""


class ProgramEnded(BaseException):
    """The process of the program ended before it answered."""


class Link:
    """Asks the program one question at a time. objects: the test works with objects, whoever gives them."""

    def __init__(self, socket: int, most: int, objects: bool = False) -> None:
        self._socket = socket
        self.objects = objects
        self._most = min(most, LARGEST)
        self._asked = 0

    def ask(self, is_open: bool, action: str, target: Any, *arguments: Any, **names: Any) -> Any:
        """Returns the value, or raises the error, of one action; changes lists, dicts and sets as the program did.
        is_open: an object in it may be asked for more."""
        self._asked += 1
        plain = [wrapped(each) for each in arguments]
        request = (self._asked, action, target, plain, {name: wrapped(each) for name, each in names.items()})
        try:
            data = marshal.dumps(request, 2)
        except ValueError:
            raise TypeError("a test can pass plain values and objects of the program, nothing else") from None
        self._send(len(data).to_bytes(4, "little") + data)
        match self._answer():
            case [self._asked, "m"]:
                raise KeyError(target)
            case [self._asked, "v", value, [*after]] if len(after) == len(arguments) or action == "get":
                changed(arguments, [value_of(each, self, is_open) for each in after])
                return value_of(value, self, is_open or self.objects)
            case [self._asked, "x", [*classes], str(text)]:
                raise error_of(classes, text, action == "next")
            case answer:
                raise Forged(f"it answered {answer!r:.100}")

    def check_silence(self) -> None:
        """Raises Forged when the program wrote more than it was asked for: that comes before the answer to a last
        question, however late it was written."""
        with suppress(KeyError, ProgramEnded):  # A program that has ended writes nothing more.
            self.ask(False, "get", "")

    def _answer(self) -> Any:
        size = int.from_bytes(self._read(4), "little")
        if size > self._most + 1000:
            raise Forged(f"it announced {size} bytes, the limit is {self._most}")
        try:
            return json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise Forged(f"it answered what is no value: {error!s:.100}") from None

    def _send(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._socket, data) :]
        except OSError:
            raise ProgramEnded from None

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                more = os.read(self._socket, size - len(data))
            except ConnectionResetError:
                more = b""
            if not more:
                raise ProgramEnded
            data += more
        return bytes(data)


class ProgramObject:
    """Stands for a function or another object of the program. Its comparisons are refused: the program would make
    them. is_open: the program may answer for it. is_pythons: it is of a class of Python, whose values are asked for and
    looked at here. is_named: the test has its name."""

    def __init__(self, link: Link, number: int, kind: str, is_open: bool, is_pythons: bool) -> None:
        self.__dict__.update(
            _link=link, _number=number, _kind=kind, _is_open=is_open, _is_pythons=is_pythons, _is_named=False
        )

    def __call__(self, *arguments: Any, **names: Any) -> Any:
        if not (self._is_open or self._is_named):
            self._refuse()
        return self._link.ask(self._is_open and self._is_named, "call", self._number, *arguments, **names)

    def __getattr__(self, name: str) -> Any:
        return self._ask("attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("assign", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key) if self._is_open else self._values()[key]

    def __len__(self) -> int:
        return int(self._ask("length")) if self._is_open else len(self._values())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values())

    def __next__(self) -> Any:
        if not self._is_pythons:
            return self._ask("next")
        return self._link.ask(self._is_open, "next", self._number)

    def __contains__(self, value: Any) -> bool:
        return bool(self._ask("contains", value)) if self._is_open else value in self._values()

    def __str__(self) -> str:
        return str(self._ask("text"))

    def __repr__(self) -> str:
        return f"<{self._kind} of the program>"

    def __bool__(self) -> bool:
        self._refuse()

    def __eq__(self, other: object) -> bool:
        self._refuse()

    __hash__ = object.__hash__

    def _ask(self, action: str, *arguments: Any) -> Any:
        """Returns what the program says of an open object."""
        if not self._is_open:
            self._refuse()
        return self._link.ask(True, action, self._number, *arguments)

    def _values(self) -> list[Any]:
        """Returns what an open object, or one of Python's iterators, has one after the other."""
        if not (self._is_open or self._is_pythons):
            self._refuse()
        return list(self._link.ask(self._is_open, "values", self._number))

    def _refuse(self) -> NoReturn:
        raise AssertionError(
            f"the program gave an object of its class {self._kind}, where a plain value is wanted; a test of objects "
            "says so, by the line `# objects = true`"
        )


class Names(dict[str, Any]):
    """Names of the test; what it does not have is asked for at the program."""

    def __init__(self, link: Link) -> None:
        super().__init__(__name__="test", __builtins__=builtins)
        self._link = link

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) or (name.startswith("__") and name.endswith("__")):
            raise KeyError(name)
        value = self[name] = self._link.ask(name[:1].isupper(), "get", name)
        if isinstance(value, ProgramObject):
            value.__dict__["_is_named"] = True
        return value


def wrapped(value: Any) -> Any:
    return ("\0object", value._number) if isinstance(value, ProgramObject) else value


def value_of(plain: Any, link: Link, is_open: bool) -> Any:
    """Makes the value of an answer; raises Forged for what `text_of` does not write. is_open: of objects in it."""
    if not isinstance(plain, list):
        return plain
    try:
        letter, *parts = plain
        if letter == "o":
            number, kind, is_pythons = parts
            return ProgramObject(link, int(number), str(kind), is_open, bool(is_pythons))
        return MAKERS[letter]([value_of(part, link, is_open) for part in parts])
    except (KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise Forged(f"it answered what is no value: {error!s:.100}") from None


def paired(parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "l": list,
    "t": tuple,
    "d": paired,
    "s": set,
    "f": frozenset,
    "b": lambda parts: bytes.fromhex(parts[0]),
    "c": lambda parts: complex(float(parts[0]), float(parts[1])),
    "i": lambda parts: int(parts[0], 16),
    "n": lambda parts: float(parts[0]),
}


def changed(arguments: tuple[Any, ...], after: list[Any]) -> None:
    """Changes lists, dicts and sets that were passed as the program has changed its copies."""
    for ours, theirs in zip(arguments, after, strict=False):
        if isinstance(ours, list | bytearray) and isinstance(theirs, list | bytes):
            ours[:] = theirs
        elif isinstance(ours, dict | set) and type(theirs) is type(ours):
            ours.clear()
            ours.update(theirs)


class FromProgram:
    """Marks errors that the program raised."""


def error_of(classes: list[Any], text: str, may_stop: bool) -> Exception:
    """Makes an error with the name that the program's has, of the nearest class that Python has. may_stop: it may end
    an iteration; elsewhere that would make `all(map(...))` true."""
    for name in classes:
        base = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(base, type) and issubclass(base, Exception):
            if issubclass(base, StopIteration | StopAsyncIteration) and not may_stop:
                continue
            try:
                error: Exception = type(str(classes[0]), (base, FromProgram), {})(text)
            except TypeError:
                continue  # A class that wants more than a text.
            return error
    return Exception(text)


def run(case: dict[str, Any], socket: int, note: int) -> None:
    """Runs the test and notes how it ended."""
    sys.set_int_max_str_digits(0)
    link = Link(socket, case["output_bytes"], case["objects"])
    os.write(note, "\n".join(outcome(case["source"], link)).encode(errors="replace")[:2900])
    os._exit(0)


def outcome(source: str, link: Link) -> tuple[str, str]:
    """Returns the outcome of the test, and why."""
    try:
        try:
            exec(compile(source, "test", "exec"), Names(link))
        except SystemExit as error:
            if error.code not in (None, 0, False):
                return "failed", f"the test ended with status {error.code!r:.50}"
        link.check_silence()
    except AssertionError as error:
        kind = "error" if isinstance(error, FromProgram) else "failed"
        return kind, f"{describe(error)} in {line_of(error, source)}"
    except Forged as error:
        return "forged", str(error)
    except ProgramEnded as error:
        return "ended", f"the process of the program ended in {line_of(error, source)}"
    except BaseException as error:  # The user's test, and errors that the program raised.
        who = "the program raised " if isinstance(error, FromProgram) else ""
        return "error", f"{who}{describe(error)} in {line_of(error, source)}"
    return "passed", ""


def line_of(error: BaseException, source: str) -> str:
    """Returns the line of the test in which the error arose."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "test"]
    text = source.splitlines()[(lines[-1] or 1) - 1].strip() if lines else ""
    return f"line {lines[-1]}: {text:.200}" if lines else "the test"
