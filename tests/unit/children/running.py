"""Runs pools of children, as a service does."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar


class Startable(Protocol):
    """A pool, or a service with one."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


Started = TypeVar("Started", bound=Startable)


@asynccontextmanager
async def running(make: Callable[[asyncio.TaskGroup], Started]) -> AsyncIterator[Started]:
    """Starts what `make` makes with a group for its tasks, and stops it at the end of the block."""
    async with asyncio.TaskGroup() as tasks:
        made = make(tasks)
        try:
            await made.start()
            yield made
        finally:
            await made.stop()
