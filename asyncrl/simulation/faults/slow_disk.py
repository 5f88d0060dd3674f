"""A store in memory whose writes can be slow, and whose power cuts tear records."""

import random
from collections.abc import Callable
from typing import Self

from asyncrl.controller.journal.run_storage import MemoryStore

SLOW_WRITES = 20
"""Number of writes that one fault slows down."""


class SlowDisk(MemoryStore):
    """Blocks the loop during slow writes: time passes, and nothing else runs."""

    skip: Callable[[float], None]
    """Lets time pass while nothing runs; set by the life of a controller that uses the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._slow_writes = 0
        self._seconds = 0.0

    def slow_down(self, seconds: float) -> None:
        self._slow_writes = SLOW_WRITES
        self._seconds = seconds

    def append(self, data: bytes) -> None:
        self._wait()
        super().append(data)

    def sync(self) -> None:
        self._wait()
        super().sync()

    def put(self, folder: str, file: str, data: bytes) -> None:
        self._wait()
        super().put(folder, file, data)

    def _wait(self) -> None:
        if self._slow_writes:
            self._slow_writes -= 1
            self.skip(self._seconds)

    def after_failure(self, power_cut: bool, chance: random.Random) -> Self:
        """Returns what the next process finds. A power cut loses some or all unsynced bytes and may tear the tail."""
        if not power_cut:
            return self.after_death()
        kept = chance.choice((0, chance.randint(0, self.size), self.size))
        return self.after_power_cut(kept, chance.choice((b"", b"torn", chance.randbytes(9))))
