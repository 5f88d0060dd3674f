"""The compute thread of a worker, so that no torch call delays a message, and the profile that torch records there."""

import asyncio
import gzip
import io
import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

from asyncrl.concurrency import to_its_end
from asyncrl.errors import Refused
from asyncrl.protocols.messages import Profile
from asyncrl.telemetry.state_clock import Occupancy

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class ThreadCompute:
    """The one compute thread of a worker, which runs functions in the order of the calls.

    queued: functions that have not finished, bounded by the credit of the callers. finished: number of the others.
    """

    def __init__(self, occupancy: Occupancy) -> None:
        self.queued = 0
        self.finished = 0
        self.occupancy = occupancy
        self._executor = ThreadPoolExecutor(1, initializer=_name_compute_thread)

    async def run(self, function: Callable[[Unpack[Arguments]], Result], *args: *Arguments) -> Result:
        """Returns the function's result. Cancelling the wait does not stop a function that has begun."""
        self.queued += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._booked, function, *args)
        finally:
            self.queued -= 1
            self.finished += 1

    def _booked(self, function: Callable[[Unpack[Arguments]], Result], *args: *Arguments) -> Result:
        with self.occupancy.computing():
            return function(*args)

    def close(self) -> None:
        """Drops the functions that have not begun, and takes no more."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _name_compute_thread() -> None:
    """Names the thread for traces and stack dumps."""
    threading.current_thread().name = "compute"


# ---- profiles, in slices that bound memory and size ----------------------------------------------------------------
#
#     compute thread  ─ work ─ start ─ work ... ─ stop ─ work ─────────── start ─ ...
#     another thread                                     └─ Chrome trace: counted, and added to the gzipped one
#
# After each slice the recording pauses for as long as its events are ahead of their share of MAX_EVENTS, so that a
# trace covers its whole time, however many operators a second there are.


SLICE = 0.25
"""Seconds of one slice: some ten thousand operators of a small model, whose trace takes 0.1 s to read."""
MAX_EVENTS = 200_000
"""Events of a trace: about 5 MB gzipped, which Perfetto opens at once."""
MAX_BYTES = 16 << 20
"""Bytes of a gzipped trace, for events with long names."""
LISTED = 25
"""Operators, and kernels, in the summary."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
KEPT = ("cpu_op", "user_annotation", "cuda_runtime", *ON_GPU)
"""Categories of events that are kept."""

_recording = threading.Lock()
"""Held while this process records: torch has one profiler in a process."""


async def record_profile(compute: ThreadCompute, seconds: float) -> Profile:
    """Records for so many seconds. Raises Refused when this process records already."""
    if not _recording.acquire(blocking=False):
        raise Refused("another profile is recorded in this process: ask again when it has ended")
    loop = asyncio.get_running_loop()
    began = loop.time()
    trace = TraceBook()
    try:
        while (now := loop.time()) < began + seconds and not trace.is_full:
            slice_ = _Slice()
            try:
                await to_its_end(compute.run(slice_.start))
                await asyncio.sleep(min(SLICE, began + seconds - now))
            finally:
                await to_its_end(compute.run(slice_.stop))
            await asyncio.to_thread(slice_.add_to, trace)
            await asyncio.sleep(max(0.0, began + seconds * trace.events / MAX_EVENTS - loop.time()))
    finally:
        _recording.release()
    return trace.profile()


class _Slice:
    """One recording of torch's profiler, which starts and stops on the thread whose operators it records."""

    def __init__(self) -> None:
        self._profiler: Any = None

    def start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # It would print two lines for each slice.
        from torch.autograd.profiler import profile  # That of torch.profiler imports the compiler when it starts.

        cuda: Any = sys.modules["torch"].cuda
        make: Any = profile
        self._profiler = make(use_kineto=True, use_device="cuda" if cuda.is_initialized() else None).__enter__()

    def stop(self) -> None:
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)

    def add_to(self, trace: "TraceBook") -> None:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            self._profiler.export_chrome_trace(file.name)
            trace.add(json.loads(Path(file.name).read_bytes())["traceEvents"])


class TraceBook:
    """Collects the events of slices. events: their number. recorded: seconds of all slices."""

    def __init__(self) -> None:
        self.events = 0
        self.recorded = 0.0
        self._bytes = io.BytesIO()
        self._file = gzip.GzipFile(fileobj=self._bytes, mode="wb", compresslevel=1)
        self._file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        self._separator = b""
        self._named: set[str] = set()
        self._own: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}

    @property
    def is_full(self) -> bool:
        return self.events >= MAX_EVENTS or self._bytes.tell() >= MAX_BYTES

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Adds the events of one slice, those beyond MAX_EVENTS left out."""
        kept = []
        for event in events:
            if event.get("ph") == "M":
                self._name(event)
            elif event.get("cat") == "Trace":
                self.recorded += event["dur"] / 1e6
            elif event.get("ph") == "X" and event.get("cat") in KEPT:
                kept.append(event)
        kept = kept[: MAX_EVENTS - self.events]
        for event in kept:
            self._write({key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")})
        self.events += len(kept)
        for name, on_gpu, own in own_times(kept):
            total = self._own[on_gpu].setdefault(name, [0, 0.0])
            total[0] += 1
            total[1] += own

    def _name(self, event: Mapping[str, Any]) -> None:
        """Writes the name of a process or thread once."""
        text = json.dumps({key: value for key, value in event.items() if key != "ts"})
        if text not in self._named and len(self._named) < LISTED * 10:
            self._named.add(text)
            self._write(event)

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write(self._separator + json.dumps(event, separators=(",", ":")).encode())
        self._separator = b",\n"

    def profile(self) -> Profile:
        """Returns what was collected, once."""
        self._file.write(b"\n]}\n")
        self._file.close()
        return Profile(self._bytes.getvalue(), self.recorded, self._longest(False), self._longest(True))

    def _longest(self, on_gpu: bool) -> list[tuple[str, int, float]]:
        totals = sorted(self._own[on_gpu].items(), key=lambda item: -item[1][1])
        return [(name, int(calls), own) for name, (calls, own) in totals[:LISTED]]


def own_times(events: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, bool, float]]:
    """Yields of each event its name, whether it ran on a GPU, and its seconds without those of the events inside it, on
    the same thread."""
    threads: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    for thread in threads.values():
        thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        own = [event["dur"] for event in thread]
        around: list[int] = []
        for number, event in enumerate(thread):
            while around and thread[around[-1]]["ts"] + thread[around[-1]]["dur"] <= event["ts"]:
                around.pop()
            if around:
                own[around[-1]] -= event["dur"]
            around.append(number)
        for event, microseconds in zip(thread, own, strict=True):
            yield event["name"], event["cat"] in ON_GPU, max(0.0, microseconds) / 1e6
