"""Files of one JSON object a line."""

from pathlib import Path

import numpy as np

from asyncrl.telemetry.jsonl import LineFile, read_lines


def test_objects_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lines.jsonl"
    assert list(read_lines(path)) == [], "a file that is not there has no lines"
    file = LineFile(path)
    file.append({"a": 1, "text": "zwei\nZeilen é"})
    assert list(read_lines(path)) == [{"a": 1, "text": "zwei\nZeilen é"}]
    file.append({"a": 2})
    file.close()
    assert [line["a"] for line in read_lines(path)] == [1, 2]


def test_numbers_json_cannot_say_become_null_and_numpy_numbers_become_numbers(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines.jsonl")
    file.append({"a": float("nan"), "b": [float("inf"), np.float32(0.5)], "c": {"d": np.int64(3)}, "e": True})
    file.append({"path": Path("x")})
    file.close()
    first, second = read_lines(tmp_path / "lines.jsonl")
    assert first == {"a": None, "b": [None, 0.5], "c": {"d": 3}, "e": True}
    assert "'x'" in second["path"]


def test_a_torn_tail_is_not_read_and_is_cut_before_appending(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a":1}\n{"a":2')
    assert [line["a"] for line in read_lines(path)] == [1]
    file = LineFile(path)
    file.append({"a": 3})
    file.close()
    assert [line["a"] for line in read_lines(path)] == [1, 3]
