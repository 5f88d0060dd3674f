"""Reads and writes calls that are JSON objects, as Hermes, Qwen and Llama 3 write them."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from asyncrl.environments.tools.parsed_calls import DEEPEST, MalformedCall, Reading, ToolCall, shown

# Reads JSON strictly and within bounds: no NaN, no key twice, no depth over DEEPEST.


TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[{}\[\]]', re.DOTALL)
"""A string, with its closing quote if it has one, or a bracket. It never backtracks."""

KEYS = {"name", "arguments", "parameters", "id", "type"}
ARGUMENT_KEYS = ("arguments", "parameters")


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


def _read_call(body: str, reading: Reading, form: str) -> None:
    """Adds the call of an object, or what is wrong with it. form: what to write."""
    try:
        reading.add_call(call_of(body))
    except MalformedCall as mistake:
        reading.add_mistake(f"{mistake}; write {form}")


# Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.


OPENING = "<tool_call>"
CLOSING = "</tool_call>"
SPACE = re.compile(r"\s*+")
HERMES = OPENING + '{"name": ..., "arguments": {...}}' + CLOSING


def read_hermes(text: str, reading: Reading) -> None:
    """Reads the calls of an answer. The last one may lack its closing tag, which stop strings cut off; a tag inside a
    JSON string ends nothing."""
    # The ends of objects are searched for until one is not where a call ends; then closing tags alone count, so that no
    # part of an answer is searched again and again.
    position = 0
    aware = True
    while not reading.full and (start := text.find(OPENING, position)) >= 0:
        reading.add_text(text[position:start])
        start += len(OPENING)
        end = _end_of_object(text, start) if aware else None
        if end is None:
            aware = aware and not text.startswith("{", _skip_space(text, start))
            end = text.find(CLOSING, start)
        end = len(text) if end < 0 else end
        _read_call(text[start:end], reading, HERMES)
        position = end + len(CLOSING)
    reading.add_text(text[position:])


def _end_of_object(text: str, start: int) -> int | None:
    """Returns where the closing tag behind the object of a call is, or the end of the text where nothing follows the
    object; None if there is no whole object, or other text follows it."""
    start = _skip_space(text, start)
    if not text.startswith("{", start) or (end := end_of_value(text, start)) is None:
        return None
    end = _skip_space(text, end)
    return end if end == len(text) or text.startswith(CLOSING, end) else None


def _skip_space(text: str, position: int) -> int:
    found = SPACE.match(text, position)
    assert found is not None
    return found.end()


def render_hermes(calls: Sequence[ToolCall]) -> str:
    """Writes calls as `read_hermes` reads them."""
    objects = [json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in calls]
    return "\n".join(f"{OPENING}\n{each}\n{CLOSING}" for each in objects)


# Llama 3: {"name": ..., "parameters": {...}}, several of them separated by `;`.


TAG = "<|python_tag|>"
START = re.compile(r'^[ \t]*+(?=\{\s*+"(?:name|type)"\s*+:)|<\|python_tag\|>\s*+', re.MULTILINE)
FURTHER = re.compile(r"\s*+[;,]?\s*+(?=\{)")
OF_A_CALL = re.compile(r'"(?:parameters|arguments)"\s*+:')
LLAMA3 = '{"name": ..., "parameters": {...}}'


def read_llama3(text: str, reading: Reading) -> None:
    """Reads the calls of an answer. Behind <|python_tag|> there is a call; elsewhere an object that begins a line is
    one, if it begins with its name and has parameters: another object is text."""
    written = 0
    found = START.search(text)
    while found is not None and not reading.full:
        end = end_of_value(text, found.end()) if text.startswith("{", found.end()) else None
        body = text[found.end() : end]
        if end is None or TAG in found[0] or OF_A_CALL.search(body):
            reading.add_text(_between(text[written : found.start()], written))
            _read_call(body, reading, LLAMA3)
            written = len(text) if end is None else end
        found = None if end is None else FURTHER.match(text, end) or START.search(text, end)
    reading.add_text(_between(text[written:], written))


def _between(text: str, written: int) -> str:
    """Returns the text between two calls, or at the beginning or the end, without a separator behind a call."""
    return text.lstrip(" \t\r\n;,") if written else text


def render_llama3(calls: Sequence[ToolCall]) -> str:
    """Writes calls as `read_llama3` reads them."""
    objects = ({"name": call.name, "parameters": call.arguments} for call in calls)
    return "; ".join(json.dumps(each, ensure_ascii=False) for each in objects)
