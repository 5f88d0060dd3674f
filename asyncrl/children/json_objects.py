"""Finds JSON objects in prose, beside braces of other kinds such as those of LaTeX."""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

MOST_BRACES = 1000
"""Opening braces, the last of a text, at which an object is looked for."""


def _by_name(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the values of an object; those of a name that it has twice are a list, for none of them is the one."""
    values: dict[str, list[Any]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return {name: each[0] if len(each) == 1 else each for name, each in values.items()}


_DECODER = json.JSONDecoder(strict=False, parse_float=Decimal, object_pairs_hook=_by_name)
_BACKSLASH = re.compile(r'(\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})|\\')
"""An escape of JSON, or a backslash that is none: LaTeX inside of a text, which models do not escape."""
_STAND_IN = "\ue000"


def json_objects(text: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the objects of a text that are in no other one, each with the place behind it."""
    readable = _BACKSLASH.sub(lambda found: found[1] or _STAND_IN, text)
    end = 0
    for place in [place.start() for place in re.finditer(r"\{", readable)][-MOST_BRACES:]:
        if place < end:
            continue
        try:
            found, end = _DECODER.raw_decode(readable, place)
        except (ValueError, RecursionError):
            continue
        plain = {
            name: value.replace(_STAND_IN, "\\") if isinstance(value, str) else value for name, value in found.items()
        }
        yield plain, end
