"""Finds JSON objects in prose, beside braces of other kinds such as those of LaTeX."""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

MOST_BRACES = 1000
"""Opening braces, the last of a text, at which an object is looked for."""


class Several(list[Any]):
    """The values of a name that an object has twice or more often: none of them is the one."""


def _by_name(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Several] = {}
    for name, value in pairs:
        values.setdefault(name, Several()).append(value)
    return {name: each[0] if len(each) == 1 else each for name, each in values.items()}


_DECODER = json.JSONDecoder(strict=False, parse_float=Decimal, object_pairs_hook=_by_name)
_INNER = re.compile(r'"\s*:\s*(?:\[[^\]]*)?\Z')
"""End of what stands before an object that is a value of another one, perhaps in a list: `"moves": [{...}, `."""
_LOOKED_BACK = 500
_BACKSLASH = re.compile(r'(\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})|\\')
"""An escape of JSON, or a backslash that is none: LaTeX inside of a text, which models do not escape."""
_STAND_IN = "\ue000"


def json_objects(text: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the objects of a text that are in no other one, each with the place behind it; those inside of one that
    does not end are none. Numbers with a point are Decimals, and a name that stands twice has Several values."""
    readable = _BACKSLASH.sub(lambda found: found[1] or _STAND_IN, text)
    end = 0
    for place in [place.start() for place in re.finditer(r"\{", readable)][-MOST_BRACES:]:
        if place < end or _INNER.search(readable, max(end, place - _LOOKED_BACK), place):
            continue
        try:
            found, behind = _DECODER.raw_decode(readable, place)
            found = _with_backslashes(found)
        except (ValueError, RecursionError):
            continue
        end = behind
        yield found, end


def _with_backslashes(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(_STAND_IN, "\\")
    if isinstance(value, dict):
        return {_with_backslashes(name): _with_backslashes(each) for name, each in value.items()}
    return type(value)(map(_with_backslashes, value)) if isinstance(value, list) else value
