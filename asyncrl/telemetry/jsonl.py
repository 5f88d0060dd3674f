"""Files of one JSON object a line, appended to while others read them."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Object = dict[str, Any]


class LineFile:
    """Appends objects to a file, one system call each, so that a killed process leaves whole lines.

    A torn last line that a lost machine left behind is cut when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_tail(path)
        self._file = path.open("ab", buffering=0)

    def append(self, values: Mapping[str, Any]) -> None:
        """Write one object; numbers that are not finite become null, which JSON can say."""
        line = json.dumps(_sayable(values), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        self._file.write(line.encode("utf-8", "replace") + b"\n")

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[Object]:
    """The objects in `path`, none when it is not there; a last line still being written is left out."""
    return read_records(path, dict)


def read_records(path: Path, record: Callable[..., T]) -> Iterator[T]:
    """`record(**object)` of each object in `path`. A line that is damaged is told on standard error and left out."""
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


def _cut_torn_tail(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


def _sayable(value: Any) -> Any:
    """What JSON can say of `value`: numbers of other libraries become Python's, anything strange its repr."""
    match value:
        case None | bool() | str():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {str(key): _sayable(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_sayable(inner) for inner in value]
    return repr(value)
