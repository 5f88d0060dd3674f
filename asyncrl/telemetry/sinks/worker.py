"""Runs a sink on a thread of its own, so that a step never waits for one that hangs, fails or is slow."""

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from asyncrl.telemetry.metrics_file import numbers

QUEUED_STEPS = 64
"""Steps that a sink may lag behind; at seconds per step a sink that lags for minutes does not catch up."""
CLOSE_DEADLINE = 5.0
"""Seconds that the end of a run waits for a sink; a run has to end within 10 s."""


class Sink(Protocol):
    """A place for metrics. Its methods may block and raise any error, because they run on a thread of their own."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class SinkWorker:
    """Feeds one sink through a bounded queue; leaves it out, with one warning, when it is down or too slow.

    Args:
        open_sink: makes the sink; called on the thread.
        say: gets the warning; called from either thread.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink], say: Callable[[str], None]) -> None:
        self.name = name
        self._open = open_sink
        self._say = say
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(QUEUED_STEPS)
        self._left_out = threading.Event()
        self._leaving = threading.Lock()
        # A daemon thread, because a sink that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._feed, name=f"sink-{name}", daemon=True)
        self._thread.start()

    @property
    def left_out(self) -> bool:
        return self._left_out.is_set()

    def write(self, step: int, metrics: Mapping[str, object]) -> None:
        """Queues the metrics of one step; returns at once."""
        if self.left_out:
            return
        try:
            self._queue.put_nowait((step, numbers(metrics)))
        except queue.Full:
            self._leave_out(f"is {QUEUED_STEPS} steps behind at step {step}")

    def close(self, deadline: float = CLOSE_DEADLINE) -> None:
        """Lets the sink finish, and waits for it at most `deadline` seconds."""
        if not self.left_out:
            try:
                self._queue.put(None, timeout=deadline)
            except queue.Full:
                self._leave_out(f"did not take its last points within {deadline:g} s")
        self._thread.join(0.0 if self.left_out else deadline)
        if self._thread.is_alive():
            self._leave_out(f"did not close within {deadline:g} s; its last points may be missing")

    def _feed(self) -> None:
        try:
            sink = self._open()
            while not self.left_out and (item := self._queue.get()) is not None:
                sink.write(*item)
            sink.close()
        except Exception as error:  # foreign code: none of its errors may end the run
            self._leave_out(f"failed with {type(error).__name__}: {error}")

    def _leave_out(self, why: str) -> None:
        with self._leaving:
            first = not self.left_out
            self._left_out.set()
        if first:
            self._say(f"the sink {self.name} {why}: it is left out; metrics.jsonl has everything")
