"""Writes logs as lines of JSON, one file per process: `RUN_DIR/logs/INSTANCE.jsonl`, which is renamed to
`INSTANCE.jsonl.old` when it is full; and keeps the warnings of a run, of which each kind is repeated at its end."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import structlog
from structlog.contextvars import merge_contextvars
from structlog.typing import FilteringBoundLogger

from asyncrl.telemetry.jsonl import LineFile, Object, read_lines

LARGEST_LOG = 8 * 2**20
"""Bytes of a log; the file before it has as many. A reward that fails for every sample writes a line for each."""


class _LogFile:
    """Takes finished events from structlog's last processor. Threads of a process share its log. Lines that a full or
    broken disk does not take are counted, and the next line that is written says how many."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._old = path.with_name(f"{path.name}.old")
        self._file = LineFile(path)
        self._lock = Lock()
        self._lost = 0

    def msg(self, **event: Any) -> None:
        with self._lock:
            try:
                self._file.append(event | ({"lines_lost_before": self._lost} if self._lost else {}))
                self._lost = 0
                if self._file.size >= LARGEST_LOG:
                    self._begin_another()
            except OSError:
                self._lost += 1

    debug = info = warning = error = critical = msg

    def close(self) -> None:
        self._file.close()

    def _begin_another(self) -> None:
        removed = "; the lines before those were removed" if self._old.exists() else ""
        self._path.replace(self._old)
        full = self._file
        self._file = LineFile(self._path)
        full.close()
        text = f"the lines before this one are in {self._old}{removed}"
        self._file.append({"event": "log continued", "level": "info", "text": text})


@contextmanager
def open_log(path: Path, **bound: Any) -> Iterator[FilteringBoundLogger]:
    """Opens a logger that writes to `path`; `bound` (service, rank, incarnation, ...) goes into every line, and so do
    ids bound inside with `structlog.contextvars.bound_contextvars(group=..., call=...)`."""
    file = _LogFile(path)
    log: FilteringBoundLogger = structlog.wrap_logger(
        file,
        processors=[
            merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("INFO"),
        cache_logger_on_first_use=True,
    )
    try:
        yield log.bind(**bound)
    finally:
        file.close()


# Keeps the warnings of a run in `warnings.jsonl`, and repeats each kind in one line when the run has ended.


LONGEST = 400
"""Characters of a repeated warning."""


@dataclass(frozen=True, slots=True)
class WarningFile:
    """Shows warnings and keeps them. say: shows one. step: returns the last step that has ended."""

    path: Path
    say: Callable[[str], None]
    step: Callable[[], int]

    def warn(self, text: str) -> None:
        """Shows a warning and writes it down. Raises OSError when the disk takes no more."""
        self.say(text)
        with closing(LineFile(self.path)) as file:
            file.append({"step": self.step(), "kind": _kind(text), "text": text})


def repeated(path: Path) -> Iterator[str]:
    """Yields a line for each kind of warning that the run gave: how often, after which step, and the newest text."""
    kinds: dict[str, list[Object]] = {}
    for line in read_lines(path):
        kinds.setdefault(line["kind"], []).append(line)
    for kind, lines in kinds.items():
        text = _short(lines[-1]["text"]).removeprefix(f"{kind}: ")
        first = lines[0]["step"]
        last = lines[-1]["step"]
        often = f"once, after step {first}" if len(lines) == 1 else f"{len(lines)} times, after steps {first} to {last}"
        yield f"{kind} ({often}): {text[:LONGEST]}"


def _short(text: str) -> str:
    """Returns the first line of a warning, with the next one where the first announces it, which is then the cause."""
    first, _, rest = text.partition("\n")
    cause = rest.strip().partition("\n")[0]
    return f"{first} {cause}".rstrip() if first.endswith(":") else first


def _kind(text: str) -> str:
    """Returns the key of the guard that a warning is from, or where another is about a step, "mismatch"."""
    begin = text.partition(":")[0]
    return begin if begin.startswith("guards.") else "mismatch" if begin.startswith("step ") else "warning"
