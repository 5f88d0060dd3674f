"""Children that run reward functions, replaced when they hang or crash.

Plain functions compute: each child runs one at a time. Coroutine functions wait for something else: they share one
more child, in which many run at once. Calls beyond that wait their turn here; there are never more of them than
samples in flight, which the gate bounds.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress

from asyncrl.errors import AsyncrlError
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.places import Places
from asyncrl.rewards.process import ChildEnded, ChildProcess, VanishedEarly
from asyncrl.rewards.sample import Sample, Verdict
from asyncrl.together import together

OVERLAPPING = 64
"""Coroutine calls that run at once: enough for a remote judge, few enough for its rate limits and our sockets."""

GRACE = 1.0
"""Seconds a child has to end an overdue coroutine by itself, before it is killed."""


class Seat:
    """A place for one child at a time; a new one is spawned when it is needed."""

    def __init__(self, specs: Sequence[FunctionSpec], start_deadline: float, tasks: asyncio.TaskGroup) -> None:
        self._specs, self._start_deadline, self._tasks = specs, start_deadline, tasks
        self._child: ChildProcess | None = None
        self._spawning, self._stopped = asyncio.Lock(), False

    async def child(self) -> ChildProcess:
        """Raises ConfigError or DeadlineExceeded when a new one cannot load the functions, ChildEnded after `stop`."""
        async with self._spawning:
            if self._stopped:
                raise ChildEnded("the reward worker was stopped")
            if self._child is None or self._child.ended:
                self._child = await self._spawn()
            return self._child

    async def _spawn(self) -> ChildProcess:
        """Once more where a signal ended the first one, which may have come from anywhere."""
        with suppress(VanishedEarly, ChildEnded):
            return await ChildProcess.spawn(self._specs, self._start_deadline, self._tasks)
        return await ChildProcess.spawn(self._specs, self._start_deadline, self._tasks)

    async def call(self, function: int, samples: Sequence[Sample], deadline: float, grace: float) -> list[Verdict]:
        """As `ChildProcess.call`. The child may have ended because of a call beside this one."""
        child = await self.child()
        try:
            return await child.call(function, samples, deadline, grace)
        except ChildEnded:
            if self._child is child:
                self._child = None
            raise

    async def stop(self) -> None:
        """No new one follows."""
        self._stopped = True
        child, self._child = self._child, None
        if child is not None:
            await child.kill()


class Pool:
    """Runs reward functions in `workers` children and, if there are coroutine functions, one more.

    deadline: seconds one call of a function may take; start_deadline: seconds a child may take to load them.
    tasks: owns the calls, which outlive a caller that was cancelled, so that its child is not killed for it.
    """

    def __init__(
        self,
        specs: Sequence[FunctionSpec],
        tasks: asyncio.TaskGroup,
        *,
        workers: int,
        deadline: float,
        start_deadline: float,
    ) -> None:
        self.specs = tuple(specs)
        self._tasks, self._deadline = tasks, deadline
        self._own = [Seat(self.specs, start_deadline, tasks) for _ in range(workers)]
        self._shared = Seat(self.specs, start_deadline, tasks)
        self._free = list(self._own)
        self._alone_at_a_time, self._overlapping = Places(workers), Places(OVERLAPPING)
        self._concurrent: list[bool] = []

    @property
    def queued(self) -> int:
        """Calls that wait for their turn."""
        return self._alone_at_a_time.waiting + self._overlapping.waiting

    async def start(self) -> None:
        """Raises ConfigError when a function cannot be loaded, DeadlineExceeded when that takes too long."""
        if not self.specs:
            return
        self._concurrent = (await self._own[0].child()).concurrent

    async def run(self, function: int, samples: Sequence[Sample]) -> list[Verdict]:
        """What function number `function` says about each of these samples, which are a group where it judges groups.
        Never raises for it."""
        return await asyncio.shield(self._tasks.create_task(self._all(function, samples)))

    async def stop(self) -> None:
        """Kill all children; calls that still run end with a verdict that says so."""
        for seat in (self._shared, *self._own):
            await seat.stop()

    async def _all(self, function: int, samples: Sequence[Sample]) -> list[Verdict]:
        """A group in one call; of coroutines one a sample; else as many calls as there are children."""
        if self.specs[function].group:
            shares = [samples]
        elif self._concurrent[function]:
            shares = [[sample] for sample in samples]
        else:
            size = math.ceil(len(samples) / len(self._own))
            shares = [samples[start : start + size] for start in range(0, len(samples), size)]
        found = await together(*(self._share(function, share) for share in shares))
        return [verdict for verdicts in found for verdict in verdicts]

    async def _share(self, function: int, samples: Sequence[Sample]) -> list[Verdict]:
        """A child that ends is blamed on the sample it worked on; the rest goes to its successor. One that a signal
        ended may have been killed from outside: it is blamed when that happens at the same sample again."""
        found: list[Verdict] = []
        vanished_at = -1
        while len(found) < len(samples):
            rest = samples[len(found) :]
            try:
                if self._concurrent[function] and vanished_at < 0:
                    found += await self._overlapped(function, rest)
                else:
                    found += await self._alone(function, rest, GRACE if self._concurrent[function] else 0.0)
            except ChildEnded as ended:
                found += ended.said
                if ended.vanished and vanished_at != len(found):
                    vanished_at = len(found)
                    continue
                blamed = len(rest) if self.specs[function].group else 1
                found += [Verdict(reason=_told(ended))] * blamed
            except AsyncrlError as error:
                found += [Verdict(reason=f"it could not be called: {error}")] * len(rest)
        return found

    async def _overlapped(self, function: int, samples: Sequence[Sample]) -> list[Verdict]:
        """A child that is lost takes all its calls along, and nobody can say which was to blame: each is made again,
        alone, where it can only blame itself."""
        try:
            async with self._overlapping:
                return await self._shared.call(function, samples, self._deadline, GRACE)
        except ChildEnded:
            return await self._alone(function, samples, GRACE)

    async def _alone(self, function: int, samples: Sequence[Sample], grace: float) -> list[Verdict]:
        async with self._alone_at_a_time:
            seat = self._free.pop()
            try:
                return await seat.call(function, samples, self._deadline, grace)
            finally:
                self._free.append(seat)


def _told(ended: ChildEnded) -> str:
    return f"{ended}; so was another one at the same sample" if ended.vanished else str(ended)
