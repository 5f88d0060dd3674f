"""Reads and writes calls as Llama 3 does: {"name": ..., "parameters": {...}}, several of them separated by `;`."""

import json
import re
from collections.abc import Sequence

from asyncrl.environments.tools.parsed_calls import MalformedCall, Reading, ToolCall, call_of, end_of_value

TAG = "<|python_tag|>"
START = re.compile(r'^[ \t]*+(?=\{\s*+"(?:name|type)"\s*+:)|<\|python_tag\|>\s*+', re.MULTILINE)
FURTHER = re.compile(r"\s*+[;,]?\s*+(?=\{)")
OF_A_CALL = re.compile(r'"(?:parameters|arguments)"\s*+:')
FORM = '{"name": ..., "parameters": {...}}'


def read(text: str, reading: Reading) -> None:
    """Reads the calls of an answer. Behind <|python_tag|> there is a call; elsewhere an object that begins a line is
    one, if it begins with its name and has parameters: another object is text."""
    written = 0
    found = START.search(text)
    while found is not None and not reading.full:
        end = end_of_value(text, found.end()) if text.startswith("{", found.end()) else None
        body = text[found.end() : end]
        if end is None or TAG in found[0] or OF_A_CALL.search(body):
            reading.add_text(_between(text[written : found.start()], written))
            _read_call(body, reading)
            written = len(text) if end is None else end
        found = None if end is None else FURTHER.match(text, end) or START.search(text, end)
    reading.add_text(_between(text[written:], written))


def _between(text: str, written: int) -> str:
    """Returns the text between two calls, or at the beginning or the end, without a separator behind a call."""
    return text.lstrip(" \t\r\n;,") if written else text


def _read_call(body: str, reading: Reading) -> None:
    try:
        reading.add_call(call_of(body))
    except MalformedCall as mistake:
        reading.add_mistake(f"{mistake}; write {FORM}")


def render(calls: Sequence[ToolCall]) -> str:
    """Writes calls as `read` reads them."""
    objects = ({"name": call.name, "parameters": call.arguments} for call in calls)
    return "; ".join(json.dumps(each, ensure_ascii=False) for each in objects)
