"""Deadlines of many calls at the cost of one timer, because nearly all of them are met."""

import asyncio
from collections.abc import Callable
from math import inf


class Deadlines:
    """Calls back at each deadline that was not discarded before."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[float, Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._earliest = inf

    def add(self, number: int, end: float, reached: Callable[[], None]) -> None:
        """Adds a deadline. end: loop time. number: chosen by the caller, for `discard`."""
        self._ends[number] = end, reached
        if end < self._earliest:
            self._wait_until(end)

    def discard(self, number: int) -> None:
        """Removes a deadline. The timer stays, and then finds the next one."""
        self._ends.pop(number, None)

    def close(self) -> None:
        """Discards all deadlines."""
        self._ends.clear()
        self._wait_until(inf)

    def _wait_until(self, end: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._earliest = end
        self._timer = None if end == inf else asyncio.get_running_loop().call_at(end, self._call_due)

    def _call_due(self) -> None:
        now = max(asyncio.get_running_loop().time(), self._earliest)  # A loop may call slightly early.
        due = [number for number, (end, _) in self._ends.items() if end <= now]
        reached = [self._ends.pop(number)[1] for number in due]
        self._wait_until(min([end for end, _ in self._ends.values()], default=inf))
        for call in reached:
            call()
