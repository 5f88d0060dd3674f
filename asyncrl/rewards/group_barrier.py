"""Waits until all members of a group are there, for functions that judge them against each other."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.rewards.sample import Sample, Verdict

Key = tuple[int, int]
"""Group and attempt: members of different attempts are never judged together."""

Verdicts = list[list[Verdict]]
Judge = Callable[[list[Sample]], Coroutine[Any, Any, Verdicts]]
"""Samples of a group, by member -> for each of them, what each function said."""


class _Group:
    def __init__(self) -> None:
        self.members: dict[int, Sample] = {}
        self.waiting = 0
        self.closed = asyncio.Event()
        self.judged: asyncio.Task[Verdicts]

    def verdicts_of(self, member: int) -> list[Verdict]:
        return self.judged.result()[sorted(self.members).index(member)]


class Gathering:
    """Groups that wait for members; there are never more than the gate has in flight.

    patience: seconds to wait for the rest. When it is over, those that came are judged without them: after a restart
    of a group, members that were trained before never come.
    """

    def __init__(self, judge: Judge, patience: float, tasks: asyncio.TaskGroup) -> None:
        self._judge, self._patience, self._tasks = judge, patience, tasks
        self._open: dict[Key, _Group] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def judged(self, key: Key, expected: int, sample: Sample) -> list[Verdict]:
        """What each function says about this sample, once `expected` members of its group are there."""
        group = self._open.setdefault(key, _Group())
        group.members[sample.member] = sample
        group.waiting += 1
        try:
            if len(group.members) == expected:
                self._close(key, group)
            await self._until_closed(key, group)
            await asyncio.shield(group.judged)
        finally:
            group.waiting -= 1
            if not group.waiting and self._open.get(key) is group:
                del self._open[key]
        return group.verdicts_of(sample.member)

    async def _until_closed(self, key: Key, group: _Group) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await group.closed.wait()
        except TimeoutError:
            if not group.closed.is_set():
                self._close(key, group)

    def _close(self, key: Key, group: _Group) -> None:
        del self._open[key]
        samples = [group.members[member] for member in sorted(group.members)]
        group.judged = self._tasks.create_task(self._judge(samples))
        group.closed.set()
