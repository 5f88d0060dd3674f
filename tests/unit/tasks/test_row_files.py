"""Rows of files and folders of all kinds, and where messages say that a row is."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks import load_prompts, read_rows
from asyncrl.tasks.row_files import JoinedRows
from tests import golden

ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def columns(source: Path | str) -> list[dict[str, Any]]:
    prompts = load_prompts(str(source))
    return [dict(prompts.row(number).columns) for number in range(len(prompts))]


def write_parquet(path: Path, *rows: dict[str, Any]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


@pytest.mark.parametrize(
    ("name", "text"),
    [("rows.json", json.dumps(ROWS, indent=1)), ("lines.json", LINES), ("rows.jsonl", LINES), ("ROWS.JSON", LINES)],
)
def test_the_same_rows_are_read_from_each_form_compressed_or_not(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode("utf-8-sig")))
    assert columns(tmp_path / name) == columns(tmp_path / f"{name}.gz") == ROWS


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("rows.json", "[3]", r"rows\.json, row 1: a row is an object such as .*, this is 3$"),
        ("rows.json", '[\n{"prompt": 1,}]', r"rows\.json, line 2: not JSON"),
        ("rows.jsonl", '\n{"prompt": "a"}\n\n{"promt": "b"}\n', r"rows\.jsonl, line 4: there is no column"),
        ("rows.csv", "promt\na\n", r"rows\.csv, line 2: there is no column"),
    ],
)
def test_mistakes_name_a_line_or_a_row_from_1(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TaskError, match=said):
        load_prompts(str(tmp_path / name))


def test_a_folder_of_parquet_files_is_one_source(tmp_path: Path) -> None:
    for number, row in enumerate((*ROWS, ROWS[0])):
        write_parquet(tmp_path / f"train-{number:05}-of-00003.parquet", row)
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert columns(tmp_path) == [*ROWS, ROWS[0]]
    assert load_prompts(str(tmp_path)).where(2) == f"{tmp_path}, train-00002-of-00003.parquet, row 1"


def test_splits_in_one_folder_are_kept_apart(tmp_path: Path) -> None:
    for split, row in zip(("train", "test"), ROWS, strict=True):
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", row)
    with golden.raises(TaskError, match=f"{tmp_path}#test.*{tmp_path}#train"):
        load_prompts(str(tmp_path))
    assert columns(f"{tmp_path}#test") == [ROWS[1]]
    with golden.raises(TaskError, match="test-00000"):
        load_prompts(f"{tmp_path}#tset")


def test_a_folder_without_rows_or_with_a_file_in_two_forms_is_refused(tmp_path: Path) -> None:
    with golden.raises(TaskError):
        load_prompts(str(tmp_path))
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "a.csv").write_text("prompt\na\n")
    with golden.raises(TaskError, match=r"a\.csv.*a\.jsonl"):
        load_prompts(str(tmp_path))


def test_files_of_several_kinds_in_a_folder_are_all_read_and_counted(tmp_path: Path) -> None:
    (tmp_path / "teil1.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    write_parquet(tmp_path / "teil2.parquet", ROWS[0])
    assert columns(tmp_path) == [*ROWS, ROWS[0]]
    assert load_prompts(str(tmp_path)).notes == (f"{tmp_path} has 3 rows: teil1.jsonl.gz 2, teil2.parquet 1",)
    assert [row["prompt"] for row in read_rows(str(tmp_path))] == [row["prompt"] for row in columns(tmp_path)]
    (tmp_path / "about.json").write_text("{}")
    with golden.raises(TaskError, match=r"about\.json"):
        load_prompts(str(tmp_path))


def test_rows_of_what_is_neither_file_nor_folder_are_refused() -> None:
    with golden.raises(TaskError, match=r'read_rows: "mine\.py:rows"'):
        read_rows("mine.py:rows")


def test_joined_rows_are_those_of_each_part_in_order() -> None:
    joined = JoinedRows(([{"n": 0}], [], [{"n": 1}, {"n": 2}]), ("a", "b", "c"))
    assert [joined[number]["n"] for number in range(len(joined))] == [0, 1, 2]
    for number in (-1, 3):
        with pytest.raises(IndexError):
            joined[number]
