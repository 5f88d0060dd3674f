"""Spans of one process, written as lines to `logs/NAME.trace.jsonl`; `trace_merge.merge` joins them for Perfetto.

Each line is an event of the Chrome trace format as it will stand in the merged file: nothing is parsed again. So it is
decided when a span begins on which lane it is drawn: on that of the span around it in the same task, else on the first
lane of its track that is free.
"""

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from itertools import count
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import Any
from zlib import crc32

BUFFERED_EVENTS = 256
"""About 30 kB a write: one system call in a few hundred events, and a killed process loses no more than these."""
CALLS = "calls"
"""The track of what runs on an event loop, where spans of many tasks are open at a time."""
MAX_EVENTS = 300_000
"""A file of about 40 MB. Events beyond are counted, and the count is written when the tracer closes."""
SHORTEST = 1e-6
"""Seconds. Perfetto does not draw slices of no length, and an arrow needs a slice to sit in."""

_encode = json.JSONEncoder(default=str, separators=(",", ":")).encode
_open_span: "ContextVar[_Span | None]" = ContextVar("asyncrl_open_span", default=None)


class Tracer:
    """Records what one process does. Without a path it records nothing and costs next to nothing.

    Recording puts a tuple into a buffer; it becomes text when the buffer is written.

    Args:
        path: file to append to, by convention `RUN_DIR/logs/INSTANCE.trace.jsonl`.
        process: the name of this process's track, e.g. "training0.0".
        now: seconds on a clock that all processes of the host share.
    """

    def __init__(self, path: Path | None, process: str, now: Callable[[], float] = time.monotonic) -> None:
        self._path, self._process, self._now = path, process, now
        self._tracks: dict[int, _Track] = {}
        # A deque, for more than one thread puts events in while one takes them out.
        self._events: deque[_Event] = deque()
        self._recorded, self._tids = count(1), count(1)
        self._writing = threading.Lock()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._pid, self._wall = crc32(path.name.encode()) >> 1, time.time() - now()
            self._describe("process_name", 0, name=process)
            self.flush()

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """A slice from here to the end of the `with`. Spans of concurrent tasks may overlap freely."""
        return _NO_SPAN if self._path is None else _Span(self, name, args)

    def flow_start(self, flow: str) -> None:
        """An arrow leaves the span open here, or a mark of its own when none is; `flow` names the arrow."""
        self._flow("s", flow)

    def flow_end(self, flow: str) -> None:
        """The arrow that `flow` names arrives here."""
        self._flow("f", flow)

    def counter(self, name: str, **values: float) -> None:
        """A point of the graph `name`, one line for each value."""
        if self._path is not None:
            self._record(("C", 0, name, self._now(), 0.0, values))

    def flush(self) -> None:
        """Write what was recorded."""
        if self._path is None:
            return
        with self._writing, self._path.open("ab", buffering=0) as file:
            text = "".join([self._line(*self._events.popleft()) for _ in range(len(self._events))])
            file.write(text.encode())

    def close(self) -> None:
        if self._path is None:
            return
        left_out = next(self._recorded) - 1 - MAX_EVENTS
        if left_out > 0:
            self._describe("process_name", 0, name=f"{self._process} ({left_out} events left out)")
        self.flush()

    def _flow(self, kind: str, flow: str) -> None:
        if self._path is None:
            return
        at, track, span = self._now(), self._track(), _open_span.get()
        if span is not None and span.track is track and span.lane is not None:
            tid = span.lane.tid
        else:
            tid = track.free_lane().tid
            self._record(("X", tid, flow, at, SHORTEST, None))
        self._record((kind, tid, flow, at, 0.0, None))

    def _track(self) -> "_Track":
        """Of this thread."""
        thread = threading.get_ident()
        if thread not in self._tracks:
            self._tracks[thread] = _Track(_name_of_track(), self._make_lane)
        return self._tracks[thread]

    def _make_lane(self, track: str, number: int) -> int:
        """Threads above the calls, those in their order."""
        tid = next(self._tids)
        self._describe("thread_name", tid, name=f"{track} {number}" if track == CALLS or number > 1 else track)
        self._describe("thread_sort_index", tid, sort_index=number if track == CALLS else 0)
        return tid

    def _describe(self, what: str, tid: int, **args: Any) -> None:
        """Not counted: there are few, and without them the others say nothing."""
        self._events.append(("M", tid, what, 0.0, 0.0, args))

    def _record(self, event: "_Event") -> None:
        if next(self._recorded) > MAX_EVENTS:
            return
        self._events.append(event)
        if len(self._events) >= BUFFERED_EVENTS:
            self.flush()

    def _line(self, kind: str, tid: int, name: str, at: float, took: float, args: dict[str, Any] | None) -> str:
        """Times in microseconds, since 1970."""
        head = f'{{"ph":"{kind}","pid":{self._pid},"tid":{tid}'
        tail = f',"args":{_encode(args)}}}\n' if args else "}\n"
        if kind == "M":
            return f'{head},"name":"{name}"{tail}'
        head = f'{head},"ts":{1e6 * (self._wall + at):.3f}'
        match kind:
            case "X":
                return f'{head},"cat":"asyncrl","name":{quoted(name)},"dur":{1e6 * took:.3f}{tail}'
            case "C":
                return f'{head},"name":{quoted(name)}{tail}'
        binding = ',"bp":"e"' if kind == "f" else ""
        return f'{head}{binding},"cat":"sample","name":"sample","id":{quoted(name)}{tail}'


_Event = tuple[str, int, str, float, float, dict[str, Any] | None]
"""Kind ("X" slice, "s", "f" ends of an arrow, "C" counter, "M" name of a track), thread, name, begin, length, args."""

_NO_SPAN = nullcontext()


class _Lane:
    """open: spans drawn here that have not ended, outermost first."""

    __slots__ = ("open", "tid")

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.open: list[_Span] = []


class _Track:
    """The lanes of one thread."""

    def __init__(self, name: str, make_tid: Callable[[str, int], int]) -> None:
        self.name, self._make_tid = name, make_tid
        self._lanes: list[_Lane] = []

    def lane_in(self, outer: "_Span | None", task: object) -> _Lane:
        """That of the span around, when nothing else can outlive that."""
        if outer is not None and outer.track is self and outer.task is task:
            lane = outer.lane
            if lane is not None and lane.open[-1] is outer:
                return lane
        return self.free_lane()

    def free_lane(self) -> _Lane:
        for lane in self._lanes:
            if not lane.open:
                return lane
        lane = _Lane(self._make_tid(self.name, len(self._lanes) + 1))
        self._lanes.append(lane)
        return lane


class _Span:
    """One `with` of Tracer.span. lane: while it is open."""

    __slots__ = ("_args", "_name", "_outer", "_start", "_tracer", "lane", "task", "track")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, Any]) -> None:
        self._tracer, self._name, self._args = tracer, name, args
        self.lane: _Lane | None = None

    def __enter__(self) -> None:
        self.track, self._outer = self._tracer._track(), _open_span.get()
        self.task = asyncio.current_task() if self.track.name == CALLS else None
        self.lane = self.track.lane_in(self._outer, self.task)
        self.lane.open.append(self)
        _open_span.set(self)
        self._start = self._tracer._now()

    def __exit__(self, *_: object) -> None:
        took = self._tracer._now() - self._start
        # Set, not reset by token: a stream may be closed in another context than it was opened in.
        _open_span.set(self._outer)
        assert self.lane is not None, "it was entered"
        lane, self.lane = self.lane, None
        lane.open.remove(self)
        self._tracer._record(("X", lane.tid, self._name, self._start, max(took, SHORTEST), self._args))


def _name_of_track() -> str:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return threading.current_thread().name
    return CALLS
