"""Attribution of worker crashes: finds the group whose samples crash the workers that run them.

At most one of the groups that ran in a worker caused its death, and perhaps none did: the worker may have been killed
from outside. So a group that was present at two deaths runs beside no other such group, and three further deaths in
its presence are attributed to the group. When a worker dies with no group that was present at an earlier death,
something else kills workers, and all counts start again.
"""

import asyncio
from collections.abc import Collection, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext

ISOLATED_AFTER, ATTRIBUTED_AFTER = 2, 5
"""Deaths in the presence of a group after which it runs isolated from other such groups, and after which the deaths are
attributed to it. Where every twentieth second one of three workers is killed from outside, a healthy group that takes
25 s is dropped once in a thousand times; attribution after 3 deaths dropped it once in fifty."""


class CrashAttribution:
    """Counts the deaths of workers, and for each group in flight the deaths at which it was present."""

    def __init__(self) -> None:
        self.deaths = 0
        self._deaths_with: dict[int, int] = {}
        self._isolation = asyncio.Lock()

    def record_death(self, running: Iterable[int], in_flight: Collection[int]) -> int | None:
        """Counts the death of a worker that was running these groups; returns the group that it is attributed to."""
        self.deaths += 1
        present = [group for group in dict.fromkeys(running) if group in in_flight]
        self._deaths_with = {group: count for group, count in self._deaths_with.items() if group in in_flight}
        if not any(group in self._deaths_with for group in present):
            self._deaths_with.clear()
        for group in present:
            self._deaths_with[group] = self._deaths_with.get(group, 0) + 1
        return next((group for group in present if self._deaths_with[group] == ATTRIBUTED_AFTER), None)

    def isolation(self, group: int) -> AbstractAsyncContextManager[object]:
        """Returns the scope in which this group runs: entered at once, unless another isolated group is running."""
        return self._isolation if self._deaths_with.get(group, 0) >= ISOLATED_AFTER else nullcontext()
