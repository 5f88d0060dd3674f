"""Reads and writes calls as Hermes and Qwen do: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

import json
import re
from collections.abc import Sequence

from asyncrl.environments.tools.parsed_calls import MalformedCall, Reading, ToolCall, call_of, end_of_value

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
SPACE = re.compile(r"\s*+")


def read(text: str, reading: Reading) -> None:
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
        _read_call(text[start:end], reading)
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


def _read_call(body: str, reading: Reading) -> None:
    try:
        reading.add_call(call_of(body))
    except MalformedCall as mistake:
        reading.add_mistake(f"{mistake}; write {OPENING}" + '{"name": ..., "arguments": {...}}' + CLOSING)


def render(calls: Sequence[ToolCall]) -> str:
    """Writes calls as `read` reads them."""
    objects = [json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in calls]
    return "\n".join(f"{OPENING}\n{each}\n{CLOSING}" for each in objects)
