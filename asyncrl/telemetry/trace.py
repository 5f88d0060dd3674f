"""Writes the spans of one process as lines of `logs/NAME.trace.jsonl`, and merges all of them for ui.perfetto.dev.

Each line is an event of the Chrome trace format, in the form that the merged file has, so that no line is parsed again.
Therefore the row in which a span is drawn is chosen when the span begins: the row of the span around it in the same
task, else the first free row of its track.
"""

import asyncio
import errno
import gzip
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import Any
from zlib import crc32

SUFFIX = ".trace.jsonl"
COMPRESSION = 1
"""Level of gzip: the next levels take half as long again and save a tenth."""
BUFFERED_EVENTS = 256
"""Events per write, about 30 kB; a killed process loses no more than these."""
CALLS = "calls"
"""Name of the track of an event loop, on which spans of many tasks are open at the same time."""
MAX_EVENTS = 300_000
"""Events in a file of about 40 MB. More are only counted; the count is written when the tracer closes."""
SHORTEST = 1e-6
"""Shortest slice in seconds: Perfetto draws no slice without length, and an arrow needs a slice."""

_encode = json.JSONEncoder(default=str, separators=(",", ":")).encode
_open_span: "ContextVar[_Span | None]" = ContextVar("asyncrl_open_span", default=None)


class Tracer:
    """Records the spans of one process as tuples in a buffer, which become text when the buffer is written.

    Args:
        path: file to append to, by convention `RUN_DIR/logs/INSTANCE.trace.jsonl`; without one nothing is recorded.
        process: the name of this process's track, e.g. "training0.0".
        now: seconds on a clock that all processes of the host share.
        since_1970: the same instant as seconds since 1970.
    """

    def __init__(
        self,
        path: Path | None,
        process: str,
        now: Callable[[], float] = time.monotonic,
        since_1970: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._process = process
        self._now = now
        self._tracks: dict[int | str, _Track] = {}
        # A deque, because several threads append events while one removes them.
        self._events: deque[_Event] = deque()
        self._recorded = count(1)
        self._tids = count(1)
        self._writing = threading.Lock()
        self._lost = 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._pid = crc32(path.name.encode()) >> 1
            self._wall = since_1970() - now()
            self._describe("process_name", 0, name=process)
            self.flush()

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Returns a context manager whose block is drawn as a slice. Spans of concurrent tasks may overlap freely."""
        return _NO_SPAN if self._path is None else _Span(self, name, args)

    def lane(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Returns a span that is drawn on a track of its own name, which all of these share."""
        return _NO_SPAN if self._path is None else _Span(self, name, args, name)

    def count(self, name: str, **values: float) -> None:
        """Draws numbers of this moment as curves on a track of this name."""
        if self._path is not None:
            self._record(("C", 0, name, self._now(), 0.0, values))

    def flow_start(self, flow: str) -> None:
        """Starts the arrow `flow` at the span that is open here, or at a mark of its own."""
        self._flow("s", flow)

    def flow_end(self, flow: str) -> None:
        self._flow("f", flow)

    def flush(self) -> None:
        """Writes what was recorded. What a full or broken disk does not take is only counted: a trace is no reason for
        a worker to fail."""
        if self._path is None:
            return
        with self._writing:
            events = [self._events.popleft() for _ in range(len(self._events))]
            try:
                _append(self._path, "".join([self._line(*event) for event in events]).encode())
            except OSError:
                self._lost += len(events)

    def close(self) -> None:
        if self._path is None:
            return
        left_out = max(0, next(self._recorded) - 1 - MAX_EVENTS) + self._lost
        if left_out > 0:
            self._describe("process_name", 0, name=f"{self._process} ({left_out} events left out)")
        self.flush()

    def _flow(self, kind: str, flow: str) -> None:
        if self._path is None:
            return
        at = self._now()
        track = self._track()
        span = _open_span.get()
        if span is not None and span.track is track and span.row is not None:
            tid = span.row.tid
        else:
            tid = track.free_row().tid
            self._record(("X", tid, flow, at, SHORTEST, None))
        self._record((kind, tid, flow, at, 0.0, None))

    def _track(self, lane: str = "") -> "_Track":
        """Returns the track of this lane; "": of this thread."""
        if lane:
            if lane not in self._tracks:
                self._tracks[lane] = _Track(lane, self._make_tid)
            return self._tracks[lane]
        thread = threading.get_ident()
        if thread not in self._tracks:
            try:
                asyncio.get_running_loop()
                name = CALLS
            except RuntimeError:
                name = threading.current_thread().name
            self._tracks[thread] = _Track(name, self._make_tid)
        return self._tracks[thread]

    def _make_tid(self, track: str, number: int) -> int:
        """Describes a new row; threads are drawn above calls, and calls in the order of their rows."""
        tid = next(self._tids)
        self._describe("thread_name", tid, name=f"{track} {number}" if track == CALLS or number > 1 else track)
        self._describe("thread_sort_index", tid, sort_index=number if track == CALLS else 0)
        return tid

    def _describe(self, what: str, tid: int, **args: Any) -> None:
        """Adds metadata, which is not counted: it is little, and needed to read the other events."""
        self._events.append(("M", tid, what, 0.0, 0.0, args))

    def _record(self, event: "_Event") -> None:
        if next(self._recorded) > MAX_EVENTS:
            return
        self._events.append(event)
        if len(self._events) >= BUFFERED_EVENTS:
            self.flush()

    def _line(self, kind: str, tid: int, name: str, at: float, took: float, args: dict[str, Any] | None) -> str:
        """Returns one event as text, with times in microseconds since 1970."""
        head = f'{{"ph":"{kind}","pid":{self._pid},"tid":{tid}'
        tail = f',"args":{_encode(args)}}}\n' if args else "}\n"
        if kind == "M":
            return f'{head},"name":"{name}"{tail}'
        head = f'{head},"ts":{1e6 * (self._wall + at):.3f}'
        if kind == "X":
            return f'{head},"cat":"asyncrl","name":{quoted(name)},"dur":{1e6 * took:.3f}{tail}'
        if kind == "C":
            return f'{head},"cat":"asyncrl","name":{quoted(name)}{tail}'
        binding = ',"bp":"e"' if kind == "f" else ""
        return f'{head}{binding},"cat":"sample","name":"sample","id":{quoted(name)}{tail}'


_Event = tuple[str, int, str, float, float, dict[str, Any] | None]
"""Kind ("X" slice, "s", "f" ends of an arrow, "C" numbers, "M" name of a track), thread, name, begin, length, args."""

_NO_SPAN = nullcontext()


def _append(path: Path, data: bytes) -> None:
    """Appends all of the data, or nothing. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if file.write(data) < len(data):
            os.ftruncate(file.fileno(), size)
            raise OSError(errno.ENOSPC, f"only a part of {len(data)} bytes could be written to {path}")


@dataclass(slots=True)
class _Row:
    """A row of a track. open: spans drawn here that have not ended, outermost first."""

    tid: int
    open: "list[_Span]" = field(default_factory=list)


@dataclass(slots=True)
class _Track:
    """The rows of one thread."""

    name: str
    make_tid: Callable[[str, int], int]
    rows: list[_Row] = field(default_factory=list)

    def row_in(self, outer: "_Span | None", task: object) -> _Row:
        """Returns the row of the span around, when no other open span can outlive it, else a free one."""
        row = outer.row if outer is not None and outer.track is self and outer.task is task else None
        return row if row is not None and row.open[-1] is outer else self.free_row()

    def free_row(self) -> _Row:
        for row in self.rows:
            if not row.open:
                return row
        self.rows.append(_Row(self.make_tid(self.name, len(self.rows) + 1)))
        return self.rows[-1]


class _Span:
    """The context manager of Tracer.span. row: where it is drawn while it is open."""

    __slots__ = ("_args", "_lane", "_name", "_outer", "_start", "_tracer", "row", "task", "track")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, Any], lane: str = "") -> None:
        self._tracer = tracer
        self._lane = lane
        self._name = name
        self._args = args
        self.row: _Row | None = None

    def __enter__(self) -> None:
        self.track = self._tracer._track(self._lane)
        self._outer = _open_span.get()
        self.task = asyncio.current_task() if self.track.name == CALLS else None
        self.row = self.track.row_in(self._outer, self.task)
        self.row.open.append(self)
        _open_span.set(self)
        self._start = self._tracer._now()

    def __exit__(self, *_: object) -> None:
        took = self._tracer._now() - self._start
        # Not reset by token, because a stream may be closed in another context than the one that opened it.
        _open_span.set(self._outer)
        assert self.row is not None, "it was entered"
        row = self.row
        self.row = None
        row.open.remove(self)
        self._tracer._record(("X", row.tid, self._name, self._start, max(took, SHORTEST), self._args))


def merge_traces(run_dir: Path) -> Path:
    """Writes `RUN_DIR/trace.json.gz` from `RUN_DIR/logs/*.trace.jsonl` and returns its path. Each worker has a process
    track, with a track for each thread and as many tracks for calls on its event loop as ran at the same time."""
    target = run_dir / "trace.json.gz"
    unfinished = run_dir / "trace.json.gz.part"
    with gzip.open(unfinished, "wb", compresslevel=COMPRESSION) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = b""
        for path in sorted((run_dir / "logs").glob(f"*{SUFFIX}")):
            lines, _, _ = path.read_bytes().rpartition(b"\n")  # Without the torn last line of a killed process.
            if lines:
                file.write(separator + lines.replace(b"\n", b",\n"))
                separator = b",\n"
        file.write(b"\n]}\n")
    os.replace(unfinished, target)
    return target
