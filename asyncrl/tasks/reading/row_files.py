"""Reads rows from files: JSONL, JSON, CSV and Parquet, compressed with gzip or not, and from folders of such files."""

import gzip
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
from asyncrl.tasks.reading.csv_rows import csv_rows
from asyncrl.tasks.reading.wrong_files import AGAIN, JSON_FILE, not_json, other_kind, unique_keys

Rows = Sequence[Mapping[str, Any]]
PARQUET = ".parquet"
SPLITS = re.compile(r"(train|training|validation|valid|val|dev|test|eval)(?![a-z])", re.IGNORECASE)
"""Beginnings of the names of files that are one split of a data set."""
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "state.json")
"""Files that describe a data set and lie beside its rows."""
SHOWN = 8
"""Files of a folder whose numbers of rows are said."""
LINE_ENDS = re.compile("\r\n|\r|\n")
"""Ends of lines; other characters that Python takes for some may stand in JSON."""


def read_file(path: Path) -> Rows:
    """Reads the rows of a file; raises TaskError when there is none, or it cannot be read."""
    try:
        if not path.is_file():
            raise TaskError(f"task.prompts: {_no_file(path)}")
        return READERS[data_suffix(path.name)](path)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise TaskError(
            f"{path}, line {line}: this is no UTF-8 text (byte 0x{error.object[error.start]:02x}); save it as UTF-8"
        ) from None
    except gzip.BadGzipFile as error:
        text = "rename it without .gz if it is not compressed"
        raise TaskError(f"task.prompts: {path} is no gzip file that can be read: {text}") from error
    except (EOFError, zlib.error) as error:
        text = f"it ends too early or is damaged: {AGAIN}"
        raise TaskError(f"task.prompts: {path} is no gzip file that can be read: {text}") from error
    except OSError as error:
        raise TaskError(f"task.prompts: {path} cannot be read: {error.strerror or error}") from error


def _no_file(path: Path) -> str:
    """Returns why there is no file at a path, and what to do."""
    if path.is_dir():
        return f"{path} is a folder: rename it without the ending {path.suffix}, and its files are read together"
    if path.exists():
        return f"{path} is a pipe or a device: write its rows into a file, which a resumed run reads again"
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, where no file is"
    others = [other for other in path.parent.glob("*") if other.is_file()]
    readable = sorted(other.name for other in others if data_suffix(other.name))
    return f"there is no file {path}{suggestion(path.name, readable)}"


def read_folder(folder: Path, split: str = "") -> Rows:
    """Reads the rows of all files in a folder, of whatever kinds, in the order of their names. split: only of files
    whose name begins with it. Raises TaskError when there are none, files of several splits, or one in two forms."""
    files = files_of_folder(folder, split)
    return JoinedRows(tuple(map(read_file, files)), tuple(path.name for path in files))


def files_of_folder(folder: Path, split: str = "") -> list[Path]:
    """Returns the files that `read_folder` reads; raises TaskError as it does."""
    named = [path for path in sorted(folder.glob("*")) if path.is_file() and holds_rows(path)]
    found = [path for path in named if path.name.lower().startswith(split.lower())]
    if not found:
        some = f" that begin with {split}{suggestion(split, [path.name for path in named])}" if split else ""
        inner = {path.parent for path in folder.glob("*/*") if data_suffix(path.name)}
        deeper = f"; name one of its folders: {', '.join(map(str, sorted(inner)))}" if inner else ""
        raise TaskError(f"task.prompts: in {folder} there are no files ending in {', '.join(READERS)}{some}{deeper}")
    if any(data_suffix(path.name) == PARQUET for path in found):
        descriptions = [path.name for path in found if data_suffix(path.name) == ".json"]
        if descriptions:
            raise TaskError(
                f"task.prompts: in {folder} {' and '.join(descriptions)} may describe the Parquet files or have rows: "
                "move it elsewhere, or name the files in a list of sources"
            )
    forms = {path.name.lower().rpartition(data_suffix(path.name))[0]: path.name for path in found}
    if twice := [path.name for path in found if path.name not in forms.values()]:
        other = forms[twice[0].lower().rpartition(data_suffix(twice[0]))[0]]
        raise TaskError(
            f"task.prompts: in {folder} {twice[0]} and {other} seem to be the same rows in two forms: name one of them"
        )
    splits = sorted({match[1].lower() for path in found if (match := SPLITS.match(path.name))})
    if len(splits) > 1 and not split:
        meant = " or ".join(f"{folder}#{each}" for each in splits)
        raise TaskError(f"task.prompts: in {folder} there are files of several splits: write {meant}")
    return found


def holds_rows(path: Path) -> bool:
    """Returns whether a file of a folder has rows, by its name; hidden files are of the system."""
    return bool(data_suffix(path.name)) and not path.name.startswith(".") and path.name not in DESCRIPTIONS


@dataclass(frozen=True)
class JoinedRows(Sequence[Mapping[str, Any]]):
    """The rows of several files, one file after the other. names: of the files."""

    parts: tuple[Rows, ...]
    names: tuple[str, ...]

    @cached_property
    def ends(self) -> list[int]:
        return list(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, number: Any) -> Any:
        part, place = located(self.ends, number)
        return self.parts[part][place]

    @property
    def counts(self) -> str:
        """Returns the number of rows of each file in words."""
        shown = [f"{name} {len(part)}" for name, part in zip(self.names, self.parts, strict=True)]
        more = [f"{len(shown) - SHOWN} more files"] if len(shown) > SHOWN else []
        return f"{len(self)} rows: {', '.join([*shown[:SHOWN], *more])}"

    def place(self, number: int) -> str:
        """Returns the name of a row in messages."""
        part, place = located(self.ends, number)
        return f"{self.names[part]}, {place_of(self.parts[part], place)}"


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
    return rows.place(number) if isinstance(rows, LinesOfRows | JoinedRows) else f"row {number + 1}"


def unchecked(rows: Rows, column: str) -> Sequence[int]:
    """Returns the numbers of rows to look at when rows were read: all that are in memory as such. Others are made on
    demand, maybe millions: of each part the first one, and of a table the first whose `column` is empty."""
    if isinstance(rows, JoinedRows):
        found = zip([0, *rows.ends], rows.parts, strict=False)
        return [begin + number for begin, part in found for number in unchecked(part, column)]
    if isinstance(rows, list):
        return range(len(rows))
    first = [0] if len(rows) else []
    return first + ([] if not isinstance(rows, ArrowRows) else rows.without(column))


def _bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.name.lower().endswith(COMPRESSED) else data


def _text(path: Path) -> str:
    """Reads text without the byte order mark that some programs write."""
    data = _bytes(path)
    if kind := other_kind(data):
        raise TaskError(f"task.prompts: {path} is {kind}")
    return data.decode("utf-8-sig")


def _jsonl(path: Path) -> Rows:
    return _rows_of_lines(_text(path), path)


def _rows_of_lines(text: str, path: Path) -> Rows:
    rows, lines = LinesOfRows(), LINE_ENDS.split(text)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            is_last = not any(map(str.strip, lines[number:]))
            raise TaskError(f"{where}: {not_json(error, line, is_last)}") from None
        if isinstance(row, list) and len(rows) == 0 and all(isinstance(each, dict) for each in row):
            raise TaskError(f"{where}: this is a list of rows, and a line holds one row: {JSON_FILE}")
        rows.append(_object(row, where))
        rows.lines.append(number)
    return rows


def _json(path: Path) -> Rows:
    """Reads a list of rows; what holds one row a line is read as JSONL."""
    text = _text(path)
    if not text.strip():
        return []
    try:
        found = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            return _rows_of_lines(text, path)
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise TaskError(f"{path}{line}: {not_json(error, text, is_last=True)}") from None
    if isinstance(found, dict) and _holds_columns(found):
        raise TaskError(
            f"{path}: this is one object with {', '.join(found)}, and rows are a list: write the list alone, one "
            'object a row (of a pandas.DataFrame: frame.to_json(path, orient="records"))'
        )
    rows = found if isinstance(found, list) else [found]
    return [_object(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def _holds_columns(found: dict[str, Any]) -> bool:
    """Returns whether each value holds several others, and none of them are messages, so that this is no row."""
    columns = [list(value.values()) if isinstance(value, dict) else value for value in found.values()]
    if not columns or not all(isinstance(column, list) for column in columns):
        return False
    return not any("role" in each for column in columns for each in column if isinstance(each, dict))


def _object(row: Any, where: str) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    raise TaskError(f'{where}: a row is an object such as {{"prompt": ...}}, this is {json.dumps(row)[:80]}')


def _csv(path: Path) -> Rows:
    rows = LinesOfRows()
    for line, row in csv_rows(_text(path), path):
        rows.append(row)
        rows.lines.append(line)
    return rows


@dataclass(frozen=True, slots=True)
class ArrowRows(Sequence[Mapping[str, Any]]):
    """Makes rows of an Arrow table one by one; verl's files are such tables with nested columns."""

    table: Any

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, number: Any) -> Any:
        return self.table.slice(number, 1).to_pylist()[0]

    def without(self, column: str) -> list[int]:
        """Returns the first row in which a column is null, if there is one."""
        if column not in self.table.column_names or not (found := self.table.column(column)).null_count:
            return []
        compute = optional_module("pyarrow.compute", "parquet")
        return [int(compute.index(found.is_null(), True).as_py())]


def _parquet(path: Path) -> Rows:
    parquet = optional_module("pyarrow.parquet", "parquet")
    try:
        return ArrowRows(parquet.read_table(path))
    except (optional_module("pyarrow", "parquet").ArrowException, OSError) as error:
        text = str(error).partition("\n")[0]
        if match := re.search(r"Multiple matches for FieldRef\.Name\((.*?)\)", text):
            raise TaskError(f'task.prompts: {path} has several columns "{match[1]}": give each another name') from None
        raise TaskError(f"task.prompts: {path} is no Parquet file that can be read: {text}; {AGAIN}") from error


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
