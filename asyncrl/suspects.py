"""Which group kills the workers that it runs in, if any does: told by who was there when workers died.

Of the groups that ran in a worker when it died at most one is to blame, and perhaps none: it may have been killed from
outside. So a group that was there twice runs beside no other one that was, and is blamed when workers die with it three
times more. When a worker dies and nobody was there who had been there before, something else kills workers, and all
that was noted is forgotten.
"""

import asyncio
from collections.abc import Collection, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext

SUSPECT, GUILTY = 2, 5
"""Deaths that a group was there at, since one that needed none of those noted: then it runs apart from other suspects;
then it is to blame. Where every twentieth second one of three workers is killed from outside, a healthy group that
takes 25 s is blamed once in a thousand times; with a verdict after 3 deaths it was once in fifty."""


class Suspects:
    """deaths: of workers, told so far."""

    def __init__(self) -> None:
        self.deaths = 0
        self._present: dict[int, int] = {}
        self._apart = asyncio.Lock()

    def died(self, running: Iterable[int], in_flight: Collection[int]) -> int | None:
        """A worker died while it worked for these groups; returns the one to blame for it."""
        self.deaths += 1
        there = [group for group in dict.fromkeys(running) if group in in_flight]
        self._present = {group: count for group, count in self._present.items() if group in in_flight}
        if not any(group in self._present for group in there):
            self._present.clear()
        for group in there:
            self._present[group] = self._present.get(group, 0) + 1
        return next((group for group in there if self._present[group] == GUILTY), None)

    def turn(self, group: int) -> AbstractAsyncContextManager[object]:
        """Enter it to run this group: at once, unless it is a suspect and another one runs."""
        return self._apart if self._present.get(group, 0) >= SUSPECT else nullcontext()
