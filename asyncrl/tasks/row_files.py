"""Reads rows from files: JSONL, JSON, CSV and Parquet, compressed with gzip or not, and from folders of such files."""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config.install_hints import install_extra
from asyncrl.config.named_files import COMPRESSED, data_suffix
from asyncrl.config.user_code import suggestion
from asyncrl.errors import TaskError

# Says what a file is that cannot be read as what its name says, and what to do.


RENAME = "rename it, so that its name ends in {}"
UNPACK = "unpack it, or compress it with gzip"
AGAIN = "copy or download it once more"
SAVE = "save it as UTF-8"
BEGINNINGS: tuple[tuple[bytes, str], ...] = (
    (b"\xef\xbb\xbf", ""),
    (b"\xff\xfe\0\0", f"UTF-32 text: {SAVE}"),
    (b"\0\0\xfe\xff", f"UTF-32 text: {SAVE}"),
    (b"\xff\xfe", f"UTF-16 text: {SAVE}"),
    (b"\xfe\xff", f"UTF-16 text: {SAVE}"),
    (b"\x1f\x8b", f"compressed with gzip: {RENAME.format('.gz')}"),
    (b"BZh", f"compressed with bzip2: {UNPACK}"),
    (b"\xfd7zXZ", f"compressed with xz: {UNPACK}"),
    (b"\x28\xb5\x2f\xfd", f"compressed with zstd: {UNPACK}"),
    (b"PK\x03\x04", "a zip archive or a spreadsheet: unpack it, or save it as .csv"),
    (b"PAR1", f"a Parquet file: {RENAME.format('.parquet')}"),
    (b"version https://git-lfs", "a pointer of Git LFS, and not the data: run `git lfs pull`"),
)
"""First bytes of files of other kinds, and what they are."""
PAGES = (b"<!doctype", b"<html", b"<?xml")
"""First bytes of pages, in small letters, with which servers answer what they do not have."""
ENDINGS = {
    ".ndjson": RENAME.format(".jsonl"),
    ".tsv": RENAME.format(".csv"),
    **dict.fromkeys((".bz2", ".xz", ".zst", ".zip"), UNPACK),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save it as .csv"),
    **dict.fromkeys((".txt", ".yaml", ".yml", ".arrow", ".feather", ".pkl"), "write its rows as .jsonl"),
}
"""Advice about files of other endings."""
JSON_FILE = RENAME.format(".json")
TEXT_OF_NUMBER = "a number of over 4300 digits: write it as text"


class TwoValues(ValueError):
    """Reports that an object has two values for one key."""


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns an object of JSON; raises TwoValues for a key that stands in it twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for name, after in pairwise(sorted(name for name, _ in pairs)) if name == after)
        raise TwoValues(f"{json.dumps(name)} has two values: remove one")
    return found


def other_kind(data: bytes) -> str:
    """Returns what a file of text really is, and what to do; "" where its bytes may be text."""
    for beginning, kind in BEGINNINGS:
        if data.startswith(beginning):
            return kind
    if data[:200].lstrip().lower().startswith(PAGES):
        return f"a page (HTML or XML), which servers send instead of what they do not have: {AGAIN}"
    if b"\0" not in data:
        return ""
    if not any(data[1:400:2]) or not any(data[:400:2]):
        return f"UTF-16 text, or NUL bytes: {SAVE}" if any(data[:400]) else f"full of NUL bytes: {AGAIN}"
    line = data.count(b"\n", 0, data.index(b"\0")) + 1
    return f"no text: line {line} has NUL bytes, as after a write that was cut off; write it once more"


def other_ending(name: str) -> str:
    """Returns the end of a message about a file that is not read because of its ending; "" for another name."""
    ending = next((each for each in ENDINGS if name.lower().endswith(each)), "")
    return f"; {name} is no such file: {ENDINGS[ending]}" if ending else ""


def not_json(error: ValueError | RecursionError, line: str, is_last: bool) -> str:
    """Returns why a line, or the text of a file, is no JSON, and what to do. is_last: nothing comes behind it."""
    if isinstance(error, TwoValues):
        return str(error)
    if isinstance(error, RecursionError):
        return "lists or objects lie too deep in each other: write them as text"
    if not isinstance(error, json.JSONDecodeError):
        return TEXT_OF_NUMBER
    advice = _advice(error, line, is_last)
    return f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}{advice and f'; {advice}'}"


def _advice(error: json.JSONDecodeError, line: str, is_last: bool) -> str:
    text = line.strip()
    rest = line[error.pos :].strip()
    if text.startswith(("#", "//")):
        return "JSON has no comments: remove the line"
    if text in ("[", "{") and not is_last:
        return f"a row is one line here; if the file is a list of rows, {JSON_FILE}"
    if text.startswith(("{'", "[{'")):
        return "these are quotes of Python: write rows by json.dumps"
    if error.msg == "Extra data" and rest.startswith("{"):
        return "write each row on a line of its own"
    if error.msg == "Extra data" and rest.startswith(","):
        return "rows end with the line, without a comma"
    if is_last and (not rest or error.msg.startswith("Unterminated")):
        return f"the file ends too early: {AGAIN}"
    return ""


# Reads rows of CSV, with the lines that they stand on.


OTHERS = ("\t", ";")
"""Characters that separate fields where the header has no comma, as spreadsheets write them in many countries."""


def csv_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the line on which each row begins, from 1, and the row. Raises TaskError, which names the line."""
    header = list[str]()
    begin = 1
    records = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=_separator(text))
    with _long_fields():
        while True:
            try:
                fields = next(records, None)
            except csv.Error as error:
                raise TaskError(f"{path}, line {begin}: {_advised(error)}") from None
            if fields is None:
                return
            line = begin
            begin = records.line_num + 1
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
    rows = LinesOfRows()
    lines = LINE_ENDS.split(text)
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


def optional_module(module: str, extra: str, where: str = "task.prompts: ") -> ModuleType:
    """Imports a module of an extra; raises TaskError, which begins with `where`, with the command that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != missing:
            raise
        raise TaskError(f"{where}{missing} is not installed; run: {install_extra(extra)}") from None
