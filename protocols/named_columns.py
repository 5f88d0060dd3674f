"""The columns of a row by name, with errors that say which there are."""

import difflib
from collections.abc import Mapping
from typing import Any


class Columns(dict[str, Any]):
    """A row as a user's function gets it; the error for a missing column names the existing ones."""

    def __missing__(self, name: object) -> Any:
        raise MissingColumn(missing_column(str(name), self))


class MissingColumn(KeyError):
    """A KeyError with a readable message."""

    __str__ = Exception.__str__


def missing_column(name: str, row: Mapping[str, Any]) -> str:
    """Returns the message for a missing column."""
    near = difflib.get_close_matches(name, row, 1, 0.5)
    closest = f"; did you mean {near[0]}?" if near else ""
    return f"the row has no column {name}; found are {', '.join(row) or 'none'}{closest}"
