"""Reads and writes calls as lists in Python's notation: [f(a=1), g(b="x")]. Nothing is evaluated but single literals.

The structure is read here and not by `ast.parse`, which an answer could drive out of memory or stack with chains such
as `not not ...`, and which does not say where in a text the list ends.
"""

import ast
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asyncrl.environments.tools.parsed_calls import (
    DEEPEST,
    MOST,
    MalformedCall,
    Reading,
    ToolCall,
    shown,
)

TAGS = re.compile(r"<\|python_(?:tag|start|end)\|>")
START = re.compile(r"(?:^[ \t]*+|<\|python_(?:tag|start)\|>\s*+)(?=\[\s*+[^\W\d][\w.]*+\()", re.MULTILINE)
TOKEN = re.compile(
    r"""\s*+(?:
        (?P<text>[rRuU]?(?:"{3}(?:[^"\\]|\\.|"(?!""))*+"{3} | '{3}(?:[^'\\]|\\.|'(?!''))*+'{3}
            | "(?:[^"\\\n]|\\.)*+" | '(?:[^'\\\n]|\\.)*+'))
        | (?P<number>(?:\d|\.\d)[\w.]*+(?:(?<=[eE])[+-]\d++)?)
        | (?P<name>[^\W\d]\w*+(?:\.[^\W\d]\w*+)*+)
        | (?P<mark>[\[\](){},=:+-])
    )""",
    re.VERBOSE | re.DOTALL,
)
CONSTANTS = {"True": True, "False": False, "None": None}
LARGEST_INTEGER = 14_000
"""Bits; Python refuses to write integers of more than 4,300 digits."""


class Token(NamedTuple):
    """A part of the notation. kind: "text", "number", "name", "mark", or "" where nothing fits."""

    kind: str
    text: str
    start: int
    end: int


def read(text: str, reading: Reading) -> None:
    """Reads the calls of an answer: of each list of calls that begins a line. Behind a list that cannot be read nothing
    is read, since nobody knows where it ends."""
    position = 0
    while not reading.full and (start := START.search(text, position)) is not None:
        reading.add_text(TAGS.sub("", text[position : start.start()]))
        position = _read_list(text, start.end(), reading)
    reading.add_text(TAGS.sub("", text[position:]))


def _read_list(text: str, start: int, reading: Reading) -> int:
    """Reads the list that begins at `start`. Returns where the rest of the text begins."""
    reader = _ListReader(text, start)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of "\d" in a text.
            calls = reader.calls()
    except MalformedCall as mistake:
        reading.add_mistake(f"{mistake}; write [name(argument=value)]")
        return len(text)
    for call in calls:
        reading.add_call(call)
    return reader.position


class _ListReader:
    """Reads a list of calls token by token."""

    def __init__(self, text: str, position: int) -> None:
        self.position = position
        self._text = text
        self._token = self._read_token()

    def calls(self) -> list[ToolCall]:
        found: list[ToolCall] = []
        self._items("[", "]", lambda: found.append(self._call(len(found))))
        return found

    def _call(self, number: int) -> ToolCall:
        if number >= MOST:
            raise self._mistake(f"there are more than {MOST} calls in the list")
        name = self._take_kind("name", "the name of a tool")
        arguments: dict[str, Any] = {}
        self._items("(", ")", lambda: self._argument(arguments))
        return ToolCall(name, arguments)

    def _argument(self, arguments: dict[str, Any]) -> None:
        name = self._take_kind("name", "the name of an argument, since arguments are given by name")
        self._take("=")
        if name in arguments:
            raise self._mistake(f"the argument {shown(name)} is given twice")
        arguments[name] = self._value(1)

    def _value(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise self._mistake(f"there are brackets inside brackets more than {DEEPEST} deep")
        match self._token:
            case Token("text"):
                return self._literal()
            case Token("number") | Token("mark", "+" | "-"):
                return self._number()
            case Token("name", name) if name in CONSTANTS:
                self._advance()
                return CONSTANTS[name]
            case Token("mark", "["):
                return self._list("[", "]", depth)[0]
            case Token("mark", "("):
                values, commas = self._list("(", ")", depth)
                return values[0] if len(values) == 1 and not commas else values
            case Token("mark", "{"):
                return self._object(depth)
        raise self._mistake(f"expected a value, found {self._found()}; texts have quotes")

    def _list(self, opening: str, closing: str, depth: int) -> tuple[list[Any], int]:
        """Returns the values of a list, and the number of commas in it."""
        values: list[Any] = []
        commas = self._items(opening, closing, lambda: values.append(self._value(depth + 1)))
        return values, commas

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def read_pair() -> None:
            key = self._value(depth + 1)
            if not isinstance(key, str) or key in found:
                raise self._mistake(f"the keys of an object are different texts, {shown(key)} is not")
            self._take(":")
            found[key] = self._value(depth + 1)

        self._items("{", "}", read_pair)
        return found

    def _items(self, opening: str, closing: str, read_item: Callable[[], None]) -> int:
        """Reads items between brackets, with commas between them and perhaps behind. Returns the number of commas."""
        commas = 0
        self._take(opening)
        while self._token[:2] != ("mark", closing):
            read_item()
            if self._token[:2] != ("mark", ","):
                break
            self._advance()
            commas += 1
        self._take(closing)
        return commas

    def _number(self) -> int | float:
        negative = self._token.text == "-"
        if self._token.kind == "mark":
            self._advance()
        if self._token.kind != "number":
            raise self._mistake(f"expected a number, found {self._found()}")
        value: int | float = self._literal()
        fits = value.bit_length() <= LARGEST_INTEGER if isinstance(value, int) else isinstance(value, float)
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            raise self._mistake("a number is too large or complex")
        return -value if negative else value

    def _literal(self) -> Any:
        """Returns the value of a text or a number."""
        try:
            value = ast.literal_eval(self._token.text)
            str(value if isinstance(value, str) else "").encode()
        except (SyntaxError, ValueError):  # Half of a surrogate pair is a ValueError.
            raise self._mistake(f"{self._found()} is no valid {self._token.kind}") from None
        self._advance()
        return value

    def _take_kind(self, kind: str, expected: str) -> str:
        text = self._token.text
        if self._token.kind != kind:
            raise self._mistake(f"expected {expected}, found {self._found()}")
        self._advance()
        return text

    def _take(self, mark: str) -> None:
        if self._token[:2] != ("mark", mark):
            raise self._mistake(f"expected {mark}, found {self._found()}")
        self._advance()

    def _advance(self) -> None:
        self.position = self._token.end
        self._token = self._read_token()

    def _read_token(self) -> Token:
        found = TOKEN.match(self._text, self.position)
        if found is None:
            return Token("", self._text[self.position :].lstrip()[:20], self.position, self.position)
        kind = str(found.lastgroup)
        return Token(kind, found[kind], found.start(kind), found.end())

    def _found(self) -> str:
        return shown(self._token.text) if self._token.text else "the end of the answer"

    def _mistake(self, reason: str) -> MalformedCall:
        return MalformedCall(f"a list of calls cannot be read at character {self._token.start}: {reason}")


def render(calls: Sequence[ToolCall]) -> str:
    """Writes calls as `read` reads them."""
    written = (
        f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})" for call in calls
    )
    return f"[{', '.join(written)}]"
