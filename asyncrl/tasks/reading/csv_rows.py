"""Reads rows of CSV, with the lines that they stand on."""

import csv
import io
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.errors import TaskError

OTHERS = ("\t", ";")
"""Characters that separate fields where the header has no comma, as spreadsheets write them in many countries."""


def csv_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the line on which each row begins, from 1, and the row. Raises TaskError, which names the line."""
    header, begin = list[str](), 1
    records = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=_separator(text))
    with _long_fields():
        while True:
            try:
                fields = next(records, None)
            except csv.Error as error:
                raise TaskError(f"{path}, line {begin}: {_advised(error)}") from None
            if fields is None:
                return
            line, begin = begin, records.line_num + 1
            if not fields:
                continue
            if header:
                yield line, _row(header, fields, f"{path}, line {line}")
            else:
                header = _header(fields, f"{path}, line {line}")


def _separator(text: str) -> str:
    first = text.lstrip().partition("\n")[0]
    return next((each for each in OTHERS if each in first and "," not in first), ",")


def _header(fields: list[str], where: str) -> list[str]:
    name, count = Counter(fields).most_common(1)[0]
    if count > 1:
        raise TaskError(f'{where}: {count} columns have the name "{name}": give each another one')
    return fields


def _row(header: list[str], fields: list[str], where: str) -> dict[str, Any]:
    if len(fields) != len(header):
        raise TaskError(
            f"{where}: it has {len(fields)} fields, and the header {len(header)} columns; text with a comma, quotes or "
            "a line break stands in double quotes"
        )
    return dict(zip(header, fields, strict=True))


def _advised(error: csv.Error) -> str:
    if "unexpected end" in str(error):
        return "the double quotes that begin a field here have no end: close them, and write quotes in a text twice"
    return f"no CSV that can be read ({error}): write quotes in a text twice"


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lifts the bound of 131072 characters that the module csv has for a field."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)
