"""Reads calls that are JSON objects, strictly and within bounds: no NaN, no key twice, no depth over DEEPEST."""

import json
import math
import re
from typing import Any, NoReturn

from asyncrl.environments.tools.parsed_calls import DEEPEST, MalformedCall, ToolCall

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
