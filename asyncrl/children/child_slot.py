"""Holds one child process at a time, and starts a new one when it is needed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from asyncrl.children.guarded_process import ChildEnded, GuardedProcess, VanishedEarly

Child = TypeVar("Child", bound=GuardedProcess)


class ChildSlot(Generic[Child]):
    """Calls `spawn` when it needs a child. owner: the worker, for errors. running: the child, which may have ended."""

    def __init__(self, owner: str, spawn: Callable[[], Awaitable[Child]]) -> None:
        self.running: Child | None = None
        self._owner = owner
        self._spawn = spawn
        self._finished_before = 0
        self._spawning = asyncio.Lock()
        self._stopped = False

    @property
    def finished(self) -> int:
        """Results of all its children."""
        return self._finished_before + (self.running.finished if self.running is not None else 0)

    async def child(self) -> Child:
        """Returns the child; raises ConfigError or DeadlineExceeded if it cannot load, ChildEnded after `stop`."""
        async with self._spawning:
            self._check_not_stopped()
            if self.running is None or self.running.ended:
                self._finished_before = self.finished
                self.running = None
                try:
                    self.running = await self._spawn()
                except (VanishedEarly, ChildEnded):  # A signal, perhaps from outside, may end the first try.
                    self._check_not_stopped()
                    self.running = await self._spawn()
                if self._stopped:  # While the child started.
                    await self.running.kill()
                    self._check_not_stopped()
            return self.running

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise ChildEnded(f"{self._owner} was stopped")

    async def stop(self) -> None:
        """Kills the child, also one that still starts once it has started; no new one follows."""
        self._stopped = True
        if self.running is not None:
            await self.running.kill()
