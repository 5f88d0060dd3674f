"""Reads `metrics.jsonl`, one object per finished step; metrics.toml describes the metrics."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from asyncrl.telemetry.jsonl import Object, read_lines

Metrics = Mapping[str, float]

_MEANINGS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text("utf-8"))
METRICS, FURTHER_METRICS = _MEANINGS["every_line"], _MEANINGS["further"]
"""Meanings of the metrics of every line, and of those of lines to which they apply."""


LONGEST_LINE = 2**20
"""Bytes at the end of metrics.jsonl in which the newest line is searched for."""


def newest_line(path: Path) -> str:
    """Returns the line of the last step, "" before the first one. Bytes that are no text are replaced."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LONGEST_LINE))
        return file.read().rpartition(b"\n")[0].rpartition(b"\n")[2].decode(errors="replace")


def read_metrics(path: Path) -> list[Object]:
    """Returns one object per step, in order. The latest line of a step counts: a resumed run repeats steps after its
    checkpoint, and a step that trained nothing is tried again with other samples. The void lines stay in the file."""
    surviving: list[Object] = []
    for line in read_lines(path):
        while surviving and surviving[-1]["step"] >= line["step"]:
            surviving.pop()
        surviving.append(line)
    return surviving
