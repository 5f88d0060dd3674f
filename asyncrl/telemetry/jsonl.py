"""Files with one JSON object per line, which are read while they are appended to."""

import errno
import json
import math
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Object = dict[str, Any]


class LineFile:
    """Appends objects to a file, with one system call each, so that a killed process leaves complete lines. A torn last
    line, which a crashed machine can leave, is cut when the file is opened."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = path.open("ab", buffering=0)

    def append(self, values: Mapping[str, Any]) -> None:
        """Writes one object; numbers that are not finite become null, because JSON lacks them."""
        self._file.write(_line(values))

    def append_synced(self, values: Mapping[str, Any]) -> None:
        """Writes one object and returns once it is on disk. Raises OSError, with nothing written, when the disk is full
        or fails."""
        line = _line(values)
        number = self._file.fileno()
        size = os.fstat(number).st_size
        try:
            if (written := self._file.write(line)) < len(line):
                raise OSError(
                    errno.ENOSPC, f"only {written} of {len(line)} bytes could be written to {self._file.name}"
                )
            os.fsync(number)
        except OSError:
            os.ftruncate(number, size)
            raise

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[Object]:
    """Yields the objects in `path`, none when it does not exist; leaves out a last line still being written."""
    return read_records(path, dict)


def read_records(path: Path, record: Callable[..., T]) -> Iterator[T]:
    """Yields `record(**object)` for each object in `path`; reports a damaged line on standard error and skips it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                try:
                    found = record(**json.loads(line))
                except (ValueError, TypeError) as error:
                    sys.stderr.write(f"asyncrl: {path}, line {number} is damaged and left out: {error}\n")
                else:
                    yield found


def _line(values: Mapping[str, Any]) -> bytes:
    line = json.dumps(_to_json(values), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return line.encode("utf-8", "replace") + b"\n"


def _to_json(value: Any) -> Any:
    """Returns `value` as JSON types: numbers of other libraries become Python's, other objects their repr."""
    match value:
        case None | bool() | str():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {str(key): _to_json(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_to_json(inner) for inner in value]
    return repr(value)


# Reads `metrics.jsonl`, one object per finished step; metrics.toml describes the metrics.


Metrics = Mapping[str, float]

_MEANINGS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text("utf-8"))
METRICS = _MEANINGS["every_line"]
FURTHER_METRICS = _MEANINGS["further"]
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
