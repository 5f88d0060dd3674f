"""Logs as JSON lines."""

from pathlib import Path

from structlog.contextvars import bound_contextvars

from asyncrl.telemetry.jsonl import read_lines
from asyncrl.telemetry.logs import open_log


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
