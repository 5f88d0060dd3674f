"""Spans of one process, written as lines to `logs/NAME.trace.jsonl`; `trace_merge.merge` joins them for Perfetto."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

BUFFERED_EVENTS = 256
"""About 30 kB a write: one system call in a few hundred events, and a killed process loses no more than these."""
CALLS = "calls"
"""The track of what runs on an event loop, where spans of many tasks are open at a time."""
MAX_EVENTS = 300_000
"""A file of about 40 MB. Events beyond are counted and the count is written when the tracer closes."""

_encode = json.JSONEncoder(default=str, separators=(",", ":")).encode
_numbers = itertools.count(1)
"""Of spans, unique in the process: a worker inside another process must not take that one's span for its own."""
_open_span: ContextVar[int] = ContextVar("asyncrl_open_span", default=0)


class Tracer:
    """Records what one process does. Without a path it records nothing and costs next to nothing.

    Args:
        path: file to append to, by convention `RUN_DIR/logs/INSTANCE.trace.jsonl`.
        process: the name of this process's track, e.g. "training0.0".
        now: seconds on a clock that all processes of the host share.
    """

    def __init__(self, path: Path | None, process: str, now: Callable[[], float] = time.monotonic) -> None:
        self._path, self._now = path, now
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._written = self._left_out = 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._record({"process": process, "clock": now(), "wall": time.time()})
            self.flush()

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """A slice from here to the end of the `with`. Spans of concurrent tasks may overlap freely."""
        return _NO_SPAN if self._path is None else _Span(self, name, args)

    def flow_start(self, flow: str, name: str = "") -> None:
        """An arrow leaves the span open here, or a mark of its own when none is; `flow` names the arrow."""
        self._flow("start", flow, name)

    def flow_end(self, flow: str, name: str = "") -> None:
        """The arrow that `flow` names arrives here."""
        self._flow("end", flow, name)

    def counter(self, name: str, **values: float) -> None:
        """A point of the graph `name`, one line for each value."""
        if self._path is not None:
            self._record({"counter": name, "at": self._now(), "values": values})

    def flush(self) -> None:
        with self._lock:
            self._write_out()

    def close(self) -> None:
        if self._path is None:
            return
        if self._left_out:
            with self._lock:
                self._events.append({"left_out": self._left_out})
        self.flush()

    def _flow(self, end: str, flow: str, name: str) -> None:
        if self._path is not None:
            event = {"flow": flow, "end": end, "at": self._now(), "in": _open_span.get(), "track": _track()}
            self._record({**event, "name": name or flow})

    def _record(self, event: dict[str, Any]) -> None:
        """Encoded when it is written: nobody waits for an answer then."""
        with self._lock:
            if self._written >= MAX_EVENTS:
                self._left_out += 1
                return
            self._written += 1
            self._events.append(event)
            if len(self._events) >= BUFFERED_EVENTS:
                self._write_out()

    def _write_out(self) -> None:
        if self._events and self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join([f"{_encode(event)}\n" for event in self._events]))
            self._events.clear()


_NO_SPAN = nullcontext()


class _Span:
    """One `with` of Tracer.span."""

    __slots__ = ("_args", "_name", "_number", "_outer", "_start", "_tracer")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, Any]) -> None:
        self._tracer, self._name, self._args = tracer, name, args

    def __enter__(self) -> None:
        self._outer, self._number, self._start = _open_span.get(), next(_numbers), self._tracer._now()
        _open_span.set(self._number)

    def __exit__(self, *_: object) -> None:
        # Set, not reset by token: a stream may be closed in another context than it was opened in.
        _open_span.set(self._outer)
        took = self._tracer._now() - self._start
        event = {"span": self._number, "in": self._outer, "name": self._name, "at": self._start, "for": took}
        event["track"] = _track()
        if self._args:
            event["args"] = self._args
        self._tracer._record(event)


def _track() -> str:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return threading.current_thread().name
    return CALLS
