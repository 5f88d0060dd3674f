"""The store of a run on a disk that can be slow; its power cuts tear records."""

import random
from collections.abc import Callable
from typing import Self

from asyncrl.store import MemoryStore

SLOW_WRITES = 20
"""How many writes one fault slows down."""


class Disk(MemoryStore):
    """Whoever writes is held up while the disk is slow: time passes, nothing else runs."""

    def __init__(self) -> None:
        super().__init__()
        self._slow_writes, self._seconds = 0, 0.0
        self._skip: Callable[[float], None] = _no_time

    def spin(self, skip: Callable[[float], None]) -> None:
        """skip: lets time pass while nothing runs."""
        self._skip = skip

    def slow_down(self, seconds: float) -> None:
        """Each of the next writes takes so long."""
        self._slow_writes, self._seconds = SLOW_WRITES, seconds

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
            self._skip(self._seconds)

    def found(self, power: bool, chance: random.Random) -> Self:
        """What the next process finds after a death; after a cut of the power with a torn tail and no unsynced bytes,
        or some of them, as the disk pleases."""
        if not power:
            return self.after_death()
        kept = chance.choice((0, chance.randint(0, self.size), self.size))
        return self.after_power_cut(kept, chance.choice((b"", b"torn", chance.randbytes(9))))


def _no_time(seconds: float) -> None:
    return
