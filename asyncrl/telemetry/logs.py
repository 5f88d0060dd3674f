"""Writes logs as lines of JSON, one file per process: `RUN_DIR/logs/INSTANCE.jsonl`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from structlog.contextvars import merge_contextvars
from structlog.typing import FilteringBoundLogger

from asyncrl.telemetry.jsonl import LineFile


class _LogFile(LineFile):
    """Takes finished events from structlog's last processor."""

    def msg(self, **event: Any) -> None:
        self.append(event)

    debug = info = warning = error = critical = msg


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
