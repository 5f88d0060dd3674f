"""Runs reward functions in child processes, which are replaced when they hang or crash.

A child runs one plain function at a time, because plain functions compute. Coroutine functions wait, so many of them
run at once in one more child. Further calls wait here; the gate bounds the samples in flight, and so these calls.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal

from asyncrl.concurrency import gather
from asyncrl.errors import AsyncrlError
from asyncrl.rewards.execution.child_client import ChildEnded, ChildProcess, VanishedEarly
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import FunctionResult, Sample

OVERLAPPING = 64
"""Coroutine calls that run at once: enough for a remote scorer, few enough for its rate limits and our sockets."""

GRACE = 1.0
"""Seconds a child has to end an overdue coroutine by itself, before it is killed."""


class CallSlots(asyncio.Semaphore):
    """Limits how many calls run at one time. waiting: number of calls that wait for a slot."""

    waiting = 0

    async def acquire(self) -> Literal[True]:
        self.waiting += 1
        try:
            return await super().acquire()
        finally:
            self.waiting -= 1


class ChildSlot:
    """Holds one child at a time, and calls `spawn` when it needs a new one."""

    def __init__(self, spawn: Callable[[], Awaitable[ChildProcess]]) -> None:
        self._spawn = spawn
        self._child: ChildProcess | None = None
        self._spawning = asyncio.Lock()
        self._stopped = False

    async def child(self) -> ChildProcess:
        """Returns the child; raises ConfigError or DeadlineExceeded if it cannot load, ChildEnded after `stop`."""
        async with self._spawning:
            if self._stopped:
                raise ChildEnded("the reward worker was stopped")
            if self._child is None or self._child.ended:
                # A signal, perhaps from outside, may end the first try.
                try:
                    self._child = await self._spawn()
                except (VanishedEarly, ChildEnded):
                    self._child = await self._spawn()
            return self._child

    async def stop(self) -> None:
        """Kills the child; no new one follows."""
        self._stopped = True
        if self._child is not None:
            await self._child.kill()


class ChildPool:
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
        self._tasks = tasks
        self._deadline = deadline
        spawn = partial(ChildProcess.spawn, self.specs, start_deadline, tasks)
        self._own = [ChildSlot(spawn) for _ in range(workers)]
        self._shared = ChildSlot(spawn)
        self._free = list(self._own)
        self._alone_at_a_time = CallSlots(workers)
        self._overlapping = CallSlots(OVERLAPPING)
        self._concurrent: list[bool] = []

    @property
    def queued(self) -> int:
        """Calls that wait for their turn."""
        return self._alone_at_a_time.waiting + self._overlapping.waiting

    async def start(self) -> None:
        """Starts a child; raises ConfigError if it cannot load a function, DeadlineExceeded if that takes too long."""
        if self.specs:
            self._concurrent = (await self._own[0].child()).concurrent

    async def run(self, function: int, samples: Sequence[Sample]) -> list[FunctionResult]:
        """Returns the result of function number `function` for each sample; errors of the function are results too.

        samples: a whole group if the function scores groups.
        """
        return await asyncio.shield(self._tasks.create_task(self._all(function, samples)))

    async def stop(self) -> None:
        """Kills all children; calls that still run end with a result that says so."""
        for slot in (self._shared, *self._own):
            await slot.stop()

    async def _all(self, function: int, samples: Sequence[Sample]) -> list[FunctionResult]:
        """Splits samples into calls: one for a group, one a sample for coroutines, else one for each child."""
        if self.specs[function].group:
            shares = [samples]
        elif self._concurrent[function]:
            shares = [[sample] for sample in samples]
        else:
            size = math.ceil(len(samples) / len(self._own))
            shares = [samples[start : start + size] for start in range(0, len(samples), size)]
        found = await gather(*(self._share(function, share) for share in shares))
        return [result for results in found for result in results]

    async def _share(self, function: int, samples: Sequence[Sample]) -> list[FunctionResult]:
        """Calls again with the remaining samples when a child ends; its current sample gets the error as its result,
        after a signal, which may come from outside, only if a second child ends at the same sample."""
        found: list[FunctionResult] = []
        vanished_at = -1
        while len(found) < len(samples):
            rest = samples[len(found) :]
            try:
                if self._concurrent[function] and vanished_at < 0:
                    found += await self._overlapped(function, rest)
                else:
                    found += await self._alone(function, rest, GRACE if self._concurrent[function] else 0.0)
            except ChildEnded as ended:
                found += ended.received
                if ended.vanished and vanished_at != len(found):
                    vanished_at = len(found)
                    continue
                failed = len(rest) if self.specs[function].group else 1
                reason = f"{ended}; so was another one at the same sample" if ended.vanished else str(ended)
                found += [FunctionResult(reason=reason)] * failed
            except AsyncrlError as error:
                found += [FunctionResult(reason=f"it could not be called: {error}")] * len(rest)
        return found

    async def _overlapped(self, function: int, samples: Sequence[Sample]) -> list[FunctionResult]:
        """Calls in the shared child. If it ends, any of its calls may be the cause, so each is repeated alone."""
        try:
            async with self._overlapping:
                return await (await self._shared.child()).call(function, samples, self._deadline, GRACE)
        except ChildEnded:
            return await self._alone(function, samples, GRACE)

    async def _alone(self, function: int, samples: Sequence[Sample], grace: float) -> list[FunctionResult]:
        async with self._alone_at_a_time:
            slot = self._free.pop()
            try:
                return await (await slot.child()).call(function, samples, self._deadline, grace)
            finally:
                self._free.append(slot)
