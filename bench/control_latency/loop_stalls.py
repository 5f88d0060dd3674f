"""Measures how long a measured workload kept the event loop from its other tasks."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK = 0.001
"""Seconds from one tick to the next on a loop that has nothing else to do."""


class Ticks:
    """Records the seconds between ticks: wall clock time, and CPU time of this thread, which other programs on the
    machine do not increase."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.computing: list[float] = []

    @property
    def seconds(self) -> float:
        return sum(self.wall)

    @property
    def stall(self) -> float:
        """Returns the longest delay of a tick in seconds; 0 without ticks."""
        return max(self.wall, default=TICK) - TICK

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._last = (loop.time(), time.thread_time())
        self.timer = loop.call_later(TICK, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        last = self._last
        self.begin(loop)
        self.wall.append(self._last[0] - last[0])
        self.computing.append(self._last[1] - last[1])


@contextmanager
def ticking() -> Iterator[Ticks]:
    """Records ticks while the block runs."""
    ticks = Ticks()
    ticks.begin(asyncio.get_running_loop())
    try:
        yield ticks
    finally:
        ticks.timer.cancel()
