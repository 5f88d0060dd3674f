"""Waits until all members of a group have arrived, for functions that score them against each other."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.rewards.sample import FunctionResult, Sample

Key = tuple[int, int]
"""Group and attempt: members of different attempts are never scored together."""

GroupResults = list[list[FunctionResult]]
ScoreGroup = Callable[[list[Sample]], Coroutine[Any, Any, GroupResults]]
"""Scores the samples of a group, by member; returns the results of all functions for each sample."""


class _Group:
    def __init__(self) -> None:
        self.members: dict[int, Sample] = {}
        self.waiting = 0
        self.closed = asyncio.Event()
        self.scoring: asyncio.Task[GroupResults]

    def results_of(self, member: int) -> list[FunctionResult]:
        return self.scoring.result()[sorted(self.members).index(member)]


class GroupBarrier:
    """Holds the groups that wait for members; the gate bounds their number.

    timeout: seconds to wait for all members. After that, the members that arrived are scored without the others: when a
    group restarts, members that were trained before do not come again.
    """

    def __init__(self, score: ScoreGroup, timeout: float, tasks: asyncio.TaskGroup) -> None:
        self._score = score
        self._timeout = timeout
        self._tasks = tasks
        self._open: dict[Key, _Group] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def results(self, key: Key, expected: int, sample: Sample) -> list[FunctionResult]:
        """Returns the result of each function for this sample, once `expected` members of its group have arrived."""
        group = self._open.setdefault(key, _Group())
        group.members[sample.member] = sample
        group.waiting += 1
        try:
            if len(group.members) == expected:
                self._close(key, group)
            await self._until_closed(key, group)
            await asyncio.shield(group.scoring)
        finally:
            group.waiting -= 1
            if not group.waiting and self._open.get(key) is group:
                del self._open[key]
        return group.results_of(sample.member)

    async def _until_closed(self, key: Key, group: _Group) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await group.closed.wait()
        except TimeoutError:
            if not group.closed.is_set():
                self._close(key, group)

    def _close(self, key: Key, group: _Group) -> None:
        del self._open[key]
        samples = [group.members[member] for member in sorted(group.members)]
        group.scoring = self._tasks.create_task(self._score(samples))
        group.closed.set()
