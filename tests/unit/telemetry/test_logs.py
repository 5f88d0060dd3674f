"""Logs as JSON lines."""

import errno
from pathlib import Path

import pytest
from structlog.contextvars import bound_contextvars

from asyncrl.telemetry import logs
from asyncrl.telemetry.jsonl import LineFile, read_lines
from asyncrl.telemetry.logs import WarningFile, open_log, repeated


def test_lines_carry_what_is_bound_and_the_ids_around_them(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "generation0.0.jsonl"
    with open_log(path, service="generation", rank=0) as log:
        log.debug("not written")
        with bound_contextvars(group=7):
            log.info("drawn", version=3)
        log.warning("slow")
    first, second = read_lines(path)
    assert first["event"] == "drawn"
    assert (first["service"], first["rank"], first["group"], first["version"]) == ("generation", 0, 7, 3)
    assert first["level"] == "info"
    assert first["timestamp"].endswith("Z")
    assert "group" not in second


def test_an_exception_is_written_with_its_traceback(tmp_path: Path) -> None:
    with open_log(tmp_path / "x.jsonl") as log:
        try:
            raise ValueError("the cause")
        except ValueError:
            log.exception("failed", where=tmp_path)
    (line,) = read_lines(tmp_path / "x.jsonl")
    assert "ValueError: the cause" in line["exception"]
    assert str(tmp_path) in line["where"]


def test_a_log_is_bounded_and_says_what_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LARGEST_LOG", 3000)
    path = tmp_path / "reward0.0.jsonl"
    old = tmp_path / "reward0.0.jsonl.old"
    said = []
    with open_log(path) as log:
        for number in range(100):
            log.warning("reward failed", member=number, error="x" * 500)
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2 * (3000 + 1000)
            said += [line["text"] for line in read_lines(path) if line["event"] == "log continued"]
    assert sorted(tmp_path.iterdir()) == [path, old]
    assert said[0] == f"the lines before this one are in {old}"
    assert said[-1] == f"the lines before this one are in {old}; the lines before those were removed"
    kept = [line["member"] for file in (old, path) for line in read_lines(file) if line["event"] == "reward failed"]
    assert kept == list(range(kept[0], 100)), "the newest are kept, each once"


def test_a_full_disk_costs_lines_and_no_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: LineFile, values: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_log(tmp_path / "x.jsonl") as log:
        log.info("before")
        with monkeypatch.context() as patch:
            patch.setattr(LineFile, "append", full)
            log.info("lost")
            log.info("lost too")
        log.info("after")
        log.info("later")
    lines = list(read_lines(tmp_path / "x.jsonl"))
    assert [(line["event"], line.get("lines_lost_before")) for line in lines] == [
        ("before", None),
        ("after", 2),
        ("later", None),
    ]


def test_each_kind_is_one_line_with_its_count_and_steps(tmp_path: Path) -> None:
    said: list[str] = []
    steps = iter((4, 9, 9, 12))
    file = WarningFile(tmp_path / "warnings.jsonl", said.append, lambda: next(steps))
    texts = [
        "guards.poison: group 1 is given up\n  prompt: 'a'",
        "step 9: mismatch/kl is 2; a smaller limit",
        "guards.poison: group 8 is given up\n  prompt: 'b'",
        "the trainer could not prefetch rows",
    ]
    for text in texts:
        file.warn(text)
    assert said == texts
    assert list(repeated(file.path)) == [
        "guards.poison (2 times, after steps 4 to 9): group 8 is given up",
        "mismatch (once, after step 9): step 9: mismatch/kl is 2; a smaller limit",
        "warning (once, after step 12): the trainer could not prefetch rows",
    ]
    assert list(repeated(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "guards.first_failure: a reward failed; logs:\nf: it raised ValueError\n  at line 3",
            "logs: f: it raised ValueError",
        ),
        (
            "guards.unscored: the last one:\nf: it hung (guards.unscored = ...)",
            "the last one: f: it hung (guards.unscored = ...)",
        ),
        ("row 3: left out:\nthere is no column x", "row 3: left out: there is no column x"),
        ("nothing follows:", "nothing follows:"),
        ("guards.poison: group 1\n  prompt: 'a'", "group 1"),
    ],
)
def test_what_the_first_line_announces_is_told(tmp_path: Path, text: str, line: str) -> None:
    file = WarningFile(tmp_path / "warnings.jsonl", lambda text: None, lambda: 1)
    file.warn(text)
    (found,) = repeated(file.path)
    assert found.endswith(line)
