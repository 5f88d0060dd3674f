"""Says what a file is that cannot be read as what its name says, and what to do."""

import json
from itertools import pairwise

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
    text, rest = line.strip(), line[error.pos :].strip()
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
