"""The disk of a trial: slow writes, and a power cut that loses what was not synced and may tear the last record."""

import asyncio
import random
from collections.abc import Callable
from typing import ParamSpec, Self, TypeVar

from asyncrl.controller.journal.run_storage import MemoryStore

P = ParamSpec("P")
R = TypeVar("R")

SLOW_WRITES = 20
"""Number of writes that one fault slows down."""


class SlowDisk(MemoryStore):
    """Takes time for slow writes. An append blocks the loop meanwhile; what goes through `run` lets other tasks run."""

    skip: Callable[[float], None]
    """Lets time pass while nothing runs; set by the life of a controller that uses the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._slow_writes = 0
        self._seconds = 0.0

    def slow_down(self, seconds: float) -> None:
        self._slow_writes = SLOW_WRITES
        self._seconds = seconds

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        size = self.size
        if seconds := self._next_seconds():
            await asyncio.sleep(seconds)
        done = work(*args, **kwargs)
        self.synced = min(self.synced, size)  # What was appended meanwhile may be on the disk, or not.
        return done

    def append(self, data: bytes) -> None:
        self.block()
        super().append(data)

    def block(self) -> None:
        """Lets the time of one write pass while nothing else runs."""
        if seconds := self._next_seconds():
            self.skip(seconds)

    def _next_seconds(self) -> float:
        slow = self._slow_writes > 0
        self._slow_writes -= slow
        return self._seconds if slow else 0.0

    def after_failure(self, power_cut: bool, chance: random.Random) -> Self:
        """Returns what the next process finds. A power cut loses some or all unsynced bytes and may tear the tail."""
        if not power_cut:
            return self.after_death()
        kept = chance.choice((0, chance.randint(0, self.size), self.size))
        return self.after_power_cut(kept, chance.choice((b"", b"torn", chance.randbytes(9))))
