"""Reads rows from files: JSONL, JSON, CSV and Parquet, compressed with gzip or not, and from folders of such files."""

import csv
import gzip
import io
import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config.install_hints import install_extra
from asyncrl.config.named_files import COMPRESSED, data_suffix
from asyncrl.config.user_code import suggestion
from asyncrl.errors import TaskError

Rows = Sequence[Mapping[str, Any]]
PARQUET = ".parquet"
SPLITS = re.compile(r"(train|training|validation|valid|val|dev|test|eval)(?![a-z])", re.IGNORECASE)
"""Beginnings of the names of files that are one split of a data set."""


def read_file(path: Path) -> Rows:
    """Reads the rows of a file; raises TaskError when there is none, or it cannot be read."""
    if not path.is_file():
        others = [other for other in path.parent.glob("*") if other.is_file()]
        readable = sorted(other.name for other in others if data_suffix(other.name))
        raise TaskError(f"task.prompts: there is no file {path}{suggestion(path.name, readable)}")
    try:
        return READERS[data_suffix(path.name)](path)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise TaskError(
            f"{path}, line {line}: this is no UTF-8 text (byte 0x{error.object[error.start]:02x}); save it as UTF-8"
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TaskError(f"task.prompts: {path} is no gzip file that can be read: {error}") from error
    except OSError as error:
        raise TaskError(f"task.prompts: {path} cannot be read: {error.strerror or error}") from error


def read_folder(folder: Path, split: str = "") -> Rows:
    """Reads the rows of all files in a folder, in the order of their names. split: only of files whose name begins with
    it. Raises TaskError when there are none, or files of several kinds or splits."""
    return JoinedRows(tuple(read_file(path) for path in files_of_folder(folder, split)))


def files_of_folder(folder: Path, split: str = "") -> list[Path]:
    """Returns the files that `read_folder` reads; raises TaskError as it does."""
    named = [path for path in sorted(folder.glob("*")) if path.is_file() and data_suffix(path.name)]
    if any(data_suffix(path.name) == PARQUET for path in named):  # Descriptions of the data lie beside them.
        named = [path for path in named if data_suffix(path.name) == PARQUET]
    found = [path for path in named if path.name.lower().startswith(split.lower())]
    if not found:
        some = f" that begin with {split}{suggestion(split, [path.name for path in named])}" if split else ""
        raise TaskError(f"task.prompts: in {folder} there are no files ending in {', '.join(READERS)}{some}")
    if len(kinds := sorted({data_suffix(path.name) for path in found})) > 1:
        raise TaskError(f"task.prompts: in {folder} there are files ending in {' and '.join(kinds)}; name one file")
    splits = sorted({match[1].lower() for path in found if (match := SPLITS.match(path.name))})
    if len(splits) > 1 and not split:
        meant = " or ".join(f"{folder}#{each}" for each in splits)
        raise TaskError(f"task.prompts: in {folder} there are files of several splits: write {meant}")
    return found


@dataclass(frozen=True)
class JoinedRows(Sequence[Mapping[str, Any]]):
    """The rows of several sources, one source after the other."""

    parts: tuple[Rows, ...]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: Any) -> Any:
        part, place = located(self._ends, number)
        return self.parts[part][place]


def located(ends: Sequence[int], number: int) -> tuple[int, int]:
    """Returns the part that holds a row of joined parts, and the row's number in it. ends: the number behind the last
    row of each part. Raises IndexError."""
    if not 0 <= number < ends[-1]:
        raise IndexError(number)
    part = bisect_right(ends, number)
    return part, number - (ends[part - 1] if part else 0)


class LinesOfRows(list[dict[str, Any]]):
    """Rows of a file with one row a line. lines: number of the line of each row, from 1; empty lines count too."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[int] = []

    def place(self, number: int) -> str:
        """Returns the name of a row in messages."""
        return f"line {self.lines[number]}"


def place_of(rows: Sequence[Any], number: int) -> str:
    """Returns the name of a row in messages: rows and lines count from 1."""
    return rows.place(number) if isinstance(rows, LinesOfRows) else f"row {number + 1}"


def _bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.name.lower().endswith(COMPRESSED) else data


def _text(path: Path) -> str:
    """Reads text without the byte order mark that some programs write."""
    return _bytes(path).decode("utf-8-sig")


def _jsonl(path: Path) -> Rows:
    return _rows_of_lines(_text(path), path)


def _rows_of_lines(text: str, path: Path) -> Rows:
    rows = LinesOfRows()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TaskError(f"{where}: not JSON ({error})") from None
        rows.append(_object(row, where))
        rows.lines.append(number)
    return rows


def _json(path: Path) -> Rows:
    """Reads a list of rows; what holds one row a line is read as JSONL."""
    text = _text(path)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _rows_of_lines(text, path)
        raise TaskError(f"{path}, line {error.lineno}: not JSON ({error})") from None
    rows = found if isinstance(found, list) else [found]
    return [_object(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def _object(row: Any, where: str) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    raise TaskError(f'{where}: a row is an object such as {{"prompt": ...}}, this is {json.dumps(row)[:80]}')


def _csv(path: Path) -> Rows:
    try:
        rows = list(csv.DictReader(io.StringIO(_text(path), newline="")))
    except csv.Error as error:
        raise TaskError(f"{path} is no CSV that can be read: {error}") from None
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise TaskError(f"{path}, row {number}: it has not as many fields as the header has columns")
    return rows


@dataclass(frozen=True, slots=True)
class ArrowRows(Sequence[Mapping[str, Any]]):
    """Makes rows of an Arrow table one by one; verl's files are such tables with nested columns."""

    table: Any

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, number: Any) -> Any:
        return self.table.slice(number, 1).to_pylist()[0]


def _parquet(path: Path) -> Rows:
    parquet = optional_module("pyarrow.parquet", "parquet")
    try:
        return ArrowRows(parquet.read_table(path))
    except (optional_module("pyarrow", "parquet").ArrowException, OSError) as error:
        raise TaskError(f"task.prompts: {path} is no Parquet file that can be read: {error}") from error


READERS: dict[str, Callable[[Path], Rows]] = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, PARQUET: _parquet}


def optional_module(module: str, extra: str) -> ModuleType:
    """Imports a module of an extra; raises TaskError with the command that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != missing:
            raise
        raise TaskError(f"task.prompts: {missing} is not installed; run: {install_extra(extra)}") from None
