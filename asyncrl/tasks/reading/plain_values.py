"""Makes plain values of what rows hold, which can be sent to other processes."""

from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np

from asyncrl.errors import TaskError

DEEPEST = 100
"""Lists and tables in each other; messages between processes hold some more."""
SMALLEST, LARGEST = -(2**63), 2**64 - 1
"""Bounds of whole numbers in messages between processes."""


def plain(value: Any, where: str, depth: int = DEEPEST) -> Any:
    """Converts `value` to None, bool, int, float, str, bytes, lists and dicts. Dates and times become text (ISO 8601),
    and so do decimals; raises TaskError, which begins with `where`, if it holds something else."""
    if type(value) is str:  # Most values are texts.
        return valid_text(value, where)
    match value:
        case None | bool() | float() | bytes():
            return value
        case str():
            return valid_text(value, where)
        case int():
            if SMALLEST <= value <= LARGEST:
                return value
            raise TaskError(f"{where}: a number of {value.bit_length()} bits; up to 64 can be sent: write it as text")
        case np.datetime64() | Decimal():
            return str(value)
        case np.ndarray() | np.generic():
            return plain(value.tolist(), where, depth)
        case datetime() | date() | time():
            return value.isoformat()
        case list() | tuple() | Mapping() if depth == 0:
            raise TaskError(f"{where}: over {DEEPEST} lists and tables lie in each other: write them as text")
        case list() | tuple():
            return [plain(item, where, depth - 1) for item in value]
        case Mapping():
            return {valid_text(str(key), where): plain(item, where, depth - 1) for key, item in value.items()}
    kind = type(value).__name__
    _, is_column, name = where.rpartition(", column ")
    advice = f', or leave it out: task.columns = {{ "{name}" = "" }}' if is_column else ""
    text = f"a value of type {kind} cannot be sent to reward functions; make it text or numbers"
    raise TaskError(f"{where}: {text}{advice}")


def valid_text(text: str, where: str) -> str:
    """Returns a text that has UTF-8; raises TaskError, which begins with `where`, for half of a surrogate pair."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise TaskError(
            f"{where}: character {error.start + 1} is {half}, half of a character that was cut apart: remove it"
        ) from None
    return text
