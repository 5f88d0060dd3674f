"""Waits until all members of a group have arrived, for functions that score them against each other."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from asyncrl.rewards.sample import FunctionResult, Sample

Key = tuple[int, int]
"""Group and attempt: members of different attempts are never scored together."""

GroupResults = list[list[FunctionResult]]
ScoreGroup = Callable[[list[Sample]], Coroutine[Any, Any, GroupResults]]
"""Scores the samples of a group, by member; returns the results of all functions for each sample."""


class _OpenGroup:
    def __init__(self) -> None:
        self.members: dict[int, Sample] = {}
        self.waiting = 0
        self.closed = asyncio.Event()
        self.scoring: asyncio.Task[GroupResults] | None = None


@dataclass(eq=False, slots=True)
class GroupBarrier:
    """Holds the groups that wait for members; the gate bounds their number. timeout: seconds after which the members
    that arrived are scored alone: when a group restarts, members that were trained before do not come again."""

    score: ScoreGroup
    timeout: float
    tasks: asyncio.TaskGroup
    _open: dict[Key, _OpenGroup] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._open)

    async def results(self, key: Key, expected: int, sample: Sample) -> list[FunctionResult]:
        """Returns the result of each function for this sample, once `expected` members of its group have arrived."""
        group = self._open.setdefault(key, _OpenGroup())
        group.members[sample.member] = sample
        group.waiting += 1
        try:
            if len(group.members) < expected:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.timeout):
                        await group.closed.wait()
            scoring = group.scoring or self._close(key, group)
            results = await asyncio.shield(scoring)
        finally:
            group.waiting -= 1
            if not group.waiting and self._open.get(key) is group:
                del self._open[key]
        return results[sorted(group.members).index(sample.member)]

    def _close(self, key: Key, group: _OpenGroup) -> asyncio.Task[GroupResults]:
        del self._open[key]
        group.scoring = self.tasks.create_task(self.score([group.members[member] for member in sorted(group.members)]))
        group.closed.set()
        return group.scoring
