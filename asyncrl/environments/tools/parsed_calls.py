"""Defines what is read of a policy's answer: calls of tools, mistakes in calls, and the text beside them."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from asyncrl.protocols.answer_text import split_thoughts

LARGEST = 2**17
"""Characters of an answer that is read; a longer one is a mistake. A thousand tokens have some
4,000. Reading so many numbers takes a second."""

DEEPEST = 64
"""Brackets inside brackets of a call. Readers recurse no deeper, so no answer exhausts the stack."""

MOST = 128
"""Calls and mistakes that are read of one answer; the rest of it is not read."""


FENCE = re.compile(r"```\w*")


class MalformedCall(ValueError):
    """Reports a call that cannot be read; the message is for the model."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as the policy wrote it. arguments: plain values, as in JSON."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Holds what an answer of the policy has. content: its text without the calls. mistakes: a message for each call
    that cannot be read."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    mistakes: tuple[str, ...] = ()


class Reading:
    """Collects what a reader finds in an answer, in order."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._mistakes: list[str] = []

    @property
    def full(self) -> bool:
        """Returns whether no further call is read."""
        return len(self._calls) + len(self._mistakes) >= MOST

    def add_text(self, text: str) -> None:
        """Adds text beside the calls. The fence of a block of code that has nothing but calls is no text."""
        text = text.strip()
        if text and not FENCE.fullmatch(text):
            self._content.append(text)

    def add_call(self, call: ToolCall) -> None:
        """Adds a call."""
        self._calls.append(call)

    def add_mistake(self, mistake: str) -> None:
        """Adds a message about a call that cannot be read."""
        self._mistakes.append(mistake)

    def result(self) -> ToolCalls:
        """Returns all that was found."""
        return ToolCalls("\n".join(self._content), tuple(self._calls), tuple(self._mistakes))


def parse(text: str, read: Callable[[str, Reading], None], opened: bool = False) -> ToolCalls:
    """Returns what `read` finds in an answer, behind its thoughts; an answer that is too long to be read is a mistake.
    opened: whether the prompt had opened the thoughts. Never raises."""
    if len(text) > LARGEST:
        return ToolCalls(text, (), (f"the answer has {len(text)} characters; at most {LARGEST} are read",))
    reading = Reading()
    thoughts, rest = split_thoughts(text, opened)
    reading.add_text(thoughts)
    read(rest, reading)
    return reading.result()


# Reads calls that are JSON objects, strictly and within bounds: no NaN, no key twice, no depth over DEEPEST.


TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[{}\[\]]', re.DOTALL)
"""A string, with its closing quote if it has one, or a bracket. It never backtracks."""

KEYS = {"name", "arguments", "parameters", "id", "type"}
ARGUMENT_KEYS = ("arguments", "parameters")
SHOWN = 60


def end_of_value(text: str, start: int) -> int | None:
    """Returns where the object or list that begins at `start` ends; None when the text ends first."""
    depth = 0
    for token in TOKEN.finditer(text, start):
        if token[0] in ("{", "["):
            depth += 1
        elif token[0] in ("}", "]"):
            depth -= 1
            if depth <= 0:
                return token.end()
    return None


def call_of(text: str) -> ToolCall:
    """Returns the call that a JSON object describes; raises MalformedCall."""
    value = read_json(text)
    if not isinstance(value, dict):
        raise MalformedCall(f"a call is an object with a name and arguments; this is {shown(text)}")
    if not isinstance(name := value.get("name"), str) or not name:
        raise MalformedCall(f'a call has a "name", the name of a tool; this one is {shown(text)}')
    if odd := [key for key in value if key not in KEYS]:
        raise MalformedCall(f'a call has "name" and "arguments"; that of {shown(name)} has {shown(odd[0])}')
    given = [value[key] for key in ARGUMENT_KEYS if key in value]
    if len(given) > 1:
        raise MalformedCall(f"the call of {shown(name)} has arguments and parameters; write one of them")
    return ToolCall(name, {} if given in ([], [None]) else _arguments(given[0], name))


def _arguments(given: Any, name: str) -> dict[str, Any]:
    value = read_json(given) if isinstance(given, str) else given
    if not isinstance(value, dict):
        raise MalformedCall(f"the arguments of {shown(name)} are an object, such as {{}}; these are {shown(given)}")
    return value


def read_json(text: str) -> Any:
    """Reads a JSON value; raises MalformedCall, also for what Python's reader lets pass."""
    _check_depth(text)
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite, parse_int=_integer
        )
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        near = shown(text[max(0, error.pos - 20) : error.pos + 20])
        raise MalformedCall(f"a call is no valid JSON: {error.msg}, at character {error.pos}, near {near}") from None
    except UnicodeEncodeError:
        raise MalformedCall("a call has half of a surrogate pair, which is no character") from None
    return value


def _check_depth(text: str) -> None:
    depth = 0
    for token in TOKEN.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)
        if depth > DEEPEST:
            raise MalformedCall(f"a call has brackets inside brackets more than {DEEPEST} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise MalformedCall(f"a call has the key {shown(key)} twice in one object")
        found[key] = value
    return found


def _no_number(text: str) -> NoReturn:
    raise MalformedCall(f"a call has {text}, which is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise MalformedCall(f"a call has the number {shown(text)}, which is too large")
    return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # Python converts some 4,300 digits at most.
        raise MalformedCall(f"a call has a number of {len(text)} digits, which is too large") from None


def shown(value: Any) -> str:
    """Returns a value of the model's as messages show it: its beginning."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
