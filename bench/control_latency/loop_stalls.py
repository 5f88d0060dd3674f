"""A ticker beside what is measured: how long it kept the event loop from its other tasks."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK = 0.001
"""Seconds from one tick to the next, on a loop that has nothing else to do."""


class Ticks:
    """Seconds from each tick to the one after it: on the wall, and of this thread's own computing, which no other
    program on the machine adds to."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.computing: list[float] = []

    @property
    def seconds(self) -> float:
        return sum(self.wall)

    @property
    def stall(self) -> float:
        """Seconds that the latest tick was late; 0 without any."""
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
    """Ticks for as long as the block runs."""
    ticks = Ticks()
    ticks.begin(asyncio.get_running_loop())
    try:
        yield ticks
    finally:
        ticks.timer.cancel()
