"""Files of rows as they come in the world: what is given, and whether it trains or is refused, with which words."""

import gzip
import json
import os
from pathlib import Path

import pytest

from tests.unit.odd_inputs.trial import Content, Refused, Trains, check, write

A = {"prompt": "a", "answer": "1"}
B = {"prompt": "b", "answer": "2"}
LINES = "".join(json.dumps(row) + "\n" for row in (A, B))
BOTH = Trains(["a", "b"])
CHAT = Trains(["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"])
TABLE: dict[str, tuple[Content, Trains | Refused]] = {
    "blank lines": ("\n" + LINES.replace("\n", "\n \n\n"), BOTH),
    "one row without an end of line": (LINES.splitlines()[0], Trains(["a", "a"])),
    "a mark of bytes and ends of lines of Windows": (LINES.replace("\n", "\r\n").encode("utf-8-sig"), BOTH),
    "ends of lines of old spreadsheets": (LINES.replace("\n", "\r"), BOTH),
    "nothing but blank lines": ("\n\n \n", Refused(["rows.jsonl: there are no rows"])),
    "UTF-16": (LINES.encode("utf-16"), Refused(["rows.jsonl is UTF-16 text", "save it as UTF-8"])),
    "UTF-16 without a mark": (LINES.encode("utf-16-le"), Refused(["rows.jsonl is UTF-16 text", "save it as UTF-8"])),
    "UTF-32": (LINES.encode("utf-32"), Refused(["rows.jsonl is UTF-32 text", "save it as UTF-8"])),
    "quotes of Windows": (b'{"prompt": "a"}\n{"prompt": "it\x92s"}', Refused(["line 2: this is no UTF-8", "0x92"])),
    "NUL bytes": (bytes(100), Refused(["rows.jsonl is full of NUL bytes", "download it once more"])),
    "NUL bytes of a crash": (LINES.encode() + b"\0\0" + LINES.encode(), Refused(["line 3 has NUL bytes"])),
    "a list of rows": (json.dumps([A, B]), Refused(["line 1: this is a list of rows", "ends in .json"])),
    "a list of rows over lines": (json.dumps([A, B], indent=1), Refused(["line 1: not JSON", "ends in .json"])),
    "rows over several lines": (json.dumps(A, indent=1), Refused(["line 1: not JSON", "a row is one line here"])),
    "two rows in one line": (LINES.replace("\n", ""), Refused(["line 1", "at column 31; write each row on a line"])),
    "commas behind rows": (LINES.replace("\n", ",\n"), Refused(["line 1", "without a comma"])),
    "comments": ("# rows\n" + LINES, Refused(["line 1: not JSON", "no comments: remove the line"])),
    "Python's own quotes": (f"{A}\n", Refused(["line 1: not JSON", "json.dumps"])),
    "a cut in a text": (LINES + '{"prompt": "c', Refused(["line 3: not JSON", "ends too early"])),
    "a cut behind a brace": (LINES + "{", Refused(["line 3: not JSON", "ends too early"])),
    "texts instead of rows": (
        '"a"\n"b"\n',
        Refused(['line 1: a row is an object such as {"prompt": ...}, this is "a"']),
    ),
    "a page of a server": ("<!DOCTYPE html><p>404", Refused(["rows.jsonl is a page", "download it once more"])),
    "a pointer of Git LFS": ("version https://git-lfs.github.com/spec/v1\noid", Refused(["`git lfs pull`"])),
    "Parquet by another name": (b"PAR1\x15\x04", Refused(["rows.jsonl is a Parquet file", "ends in .parquet"])),
    "gzip by another name": (gzip.compress(b"{}"), Refused(["rows.jsonl is compressed with gzip", "ends in .gz"])),
    "a spreadsheet": (b"PK\x03\x04\x14", Refused(["rows.jsonl is a zip archive or a spreadsheet", "save it as .csv"])),
    "a key twice": ('{"prompt": "a", "prompt": "b"}', Refused(['line 1: "prompt" has two values'])),
    "half a character": (
        '{"prompt": "a\\ud83d"}',
        Refused(["line 1, column prompt: character 2 is", "remove"]),
    ),
    "half a character in an answer": ('{"prompt": "a", "x": ["\\udc00"]}', Refused(["line 1, column x: character 1"])),
    "half a character in a name": ('{"prompt": "a", "x\\udc00": 1}', Refused(["line 1: character 2 is \\udc00"])),
    "a whole character of two halves": ('{"prompt": "\\ud83d\\ude00"}', Trains(["😀"])),
    "a number of 97 bits": (
        '{"prompt": "a", "n": 123456789012345678901234567890}',
        Refused(["line 1, column n: a number"]),
    ),
    "a number of 5000 digits": (f'{{"prompt": "a", "n": {"9" * 5000}}}', Refused(["line 1: a number", "as text"])),
    "lists 600 deep": (f'{{"prompt": "a", "x": {"[" * 600 + "]" * 600}}}', Refused(["line 1, column x: over 100"])),
    "lists 90,000 deep": (f'{{"prompt": "a", "x": {"[" * 90_000}', Refused(["line 1: lists or objects lie too deep"])),
    "names that others use": (
        '{"prompt": "a", "id": 7, "version": 3, "my col": 1, "a.b": 2, "ответ": 3, "": null, "tools": null}',
        Trains(["a"], {"id": 7, "version": 3, "my col": 1, "a.b": 2, "ответ": 3, "": None, "tools": None}),
    ),
    "columns that differ": ('{"prompt": "a", "x": 1}\n{"y": [], "prompt": "b"}', Trains(["a", "b"], {"x": 1})),
}
OTHERS: dict[str, tuple[dict[str, Content], Trains | Refused]] = {
    "an empty .json": ({"r.json": " \n"}, Refused(["r.json: there are no rows"])),
    "rows below a key": (
        {"r.json": json.dumps({"data": [A]})},
        Refused(["r.json: this is one object with data"]),
    ),
    "columns of pandas": ({"r.json": '{"prompt": {"0": "a"}}'}, Refused(["r.json: this is one", 'orient="records"'])),
    "one chat": ({"r.json": '{"prompt": [{"role": "user", "content": "a"}]}'}, CHAT),
    "a .json with a comma at its end": ({"r.json": '[\n{"prompt": "a"},\n]'}, Refused(["r.json, line"])),
    "gzip cut": ({"r.jsonl.gz": gzip.compress(LINES.encode())[:-9]}, Refused(["r.jsonl.gz is no gzip", "once more"])),
    "no gzip": ({"r.jsonl.gz": LINES}, Refused(["r.jsonl.gz is no gzip", "rename it without .gz"])),
    "xz": ({"r.jsonl.xz": b"x"}, Refused(["r.jsonl.xz is no such file: unpack it, or compress it with gzip"])),
    ".ndjson": ({"r.ndjson": LINES}, Refused(["r.ndjson is no such file: rename it", ".jsonl"])),
    "CSV of a header": ({"r.csv": "prompt,answer\n"}, Refused(["r.csv: there are no rows"])),
    "CSV with semicolons": ({"r.csv": "prompt;answer\na, b;1\n"}, Trains(["a, b"], {"answer": "1"})),
    "CSV with tabs": ({"r.csv": "prompt\tanswer\na;b\t1\n"}, Trains(["a;b"], {"answer": "1"})),
    "CSV with a long text": ({"r.csv": f'prompt,x\na,"{"x" * 200_000}"\n'}, Trains(["a"])),
    "CSV with a name twice": ({"r.csv": "prompt,prompt\na,b\n"}, Refused(["r.csv, line 1: 2 columns", '"prompt"'])),
    "CSV with a field too many": (
        {"r.csv": '\nprompt,x\n"a\nb",1\n\nc,2,\n'},
        Refused(["line 6: it has 3 fields"]),
    ),
    "CSV with open quotes": ({"r.csv": 'prompt\na\n"b\nc\n'}, Refused(["r.csv, line 3: the double quotes"])),
    "CSV without a prompt in a row": ({"r.csv": 'prompt,x\n"a\nb",1\n,2\n'}, Refused(["r.csv, line 4: a prompt is"])),
    "CSV with chats": ({"r.csv": 'prompt\n"[{""role"": ""user"", ""content"": ""a""}]"\n'}, CHAT),
    "a folder by the name of a file": (
        {"r.jsonl": None},
        Refused(["r.jsonl is a folder", "rename it"]),
    ),
    "a name with spaces, marks and emoji": ({"my #1: données 😀.jsonl": LINES}, BOTH),
}
FOLDERS: dict[str, tuple[dict[str, Content], Trains | Refused]] = {
    "files of the system and descriptions": (
        {
            "d/a.jsonl": LINES,
            "d/._a.jsonl": b"\0\5\x16",
            "d/README.md": "x",
            "d/dataset_info.json": "{}",
            "d/sub": None,
        },
        BOTH,
    ),
    "an empty file": ({"d/a.jsonl": "", "d/b.jsonl": LINES}, BOTH),
    "a bad row in the second file": (
        {"d/a.jsonl": LINES, "d/b.jsonl": '\n{"prompt": "a"}\n{"promt": "b"}\n'},
        Refused(["d, b.jsonl, line 3: there is no column"]),
    ),
    "files in folders of the folder": ({"d/train/a.jsonl": LINES}, Refused(["in d there are no files", "d/train"])),
}


@pytest.mark.parametrize(("content", "expected"), TABLE.values(), ids=TABLE)
def test_lines_of_rows(content: Content, expected: Trains | Refused, folder: Path) -> None:
    write(folder, {"rows.jsonl": content})
    check(folder, (), expected)


@pytest.mark.parametrize(("files", "expected"), OTHERS.values(), ids=OTHERS)
def test_files_of_other_kinds(files: dict[str, Content], expected: Trains | Refused, folder: Path) -> None:
    write(folder, files)
    check(folder, ("--task.prompts", *files), expected)


@pytest.mark.parametrize(("files", "expected"), FOLDERS.values(), ids=FOLDERS)
def test_folders(files: dict[str, Content], expected: Trains | Refused, folder: Path) -> None:
    write(folder, files)
    check(folder, ("--task.prompts", "d"), expected)


def test_what_is_no_file(folder: Path) -> None:
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "link.jsonl").symlink_to("gone.jsonl")
    (folder / "turn.jsonl").symlink_to("turn.jsonl")
    for name, says in {
        "pipe.jsonl": "pipe.jsonl is a pipe or a device: write its rows into a file",
        "link.jsonl": "link.jsonl is a link to gone.jsonl, where no file is",
        "turn.jsonl": "turn.jsonl is a link to turn.jsonl, where no file is",
        "https://host/rows.jsonl": "https://host/rows.jsonl is an address, and rows are read from files: download it",
        "s3://bucket/rows": "s3://bucket/rows is an address",
    }.items():
        check(folder, ("--task.prompts", name), Refused([says]))
    (folder / "real.jsonl").write_text(LINES)
    (folder / "rows.jsonl").symlink_to("real.jsonl")
    check(folder, (), BOTH)
