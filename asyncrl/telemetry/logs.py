"""Writes logs as lines of JSON, one file per process: `RUN_DIR/logs/INSTANCE.jsonl`. A full file is renamed to
`INSTANCE.jsonl.old`, in place of the one before."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import structlog
from structlog.contextvars import merge_contextvars
from structlog.typing import FilteringBoundLogger

from asyncrl.telemetry.jsonl import LineFile

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
