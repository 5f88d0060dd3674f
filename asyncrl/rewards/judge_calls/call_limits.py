"""Limits the calls to a server: those at one time, those in a second, and pauses that the server asks for."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


class CallLimits:
    """Lets calls begin one after the other. in_flight: most calls at one time. per_second: calls that begin in a
    second, evenly spaced; 0: any number. clock, sleep: of `asyncio`, unless a test has its own."""

    def __init__(self, in_flight: int, per_second: float, clock: Clock, sleep: Sleep) -> None:
        self._running = asyncio.Semaphore(in_flight)
        self._spacing = 1.0 / per_second if per_second else 0.0
        self._clock = clock
        self._sleep = sleep
        self._next = clock()
        self._paused_until = clock()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Waits for a free place and for the time of the call, and holds the place during the block."""
        async with self._running:
            begins = max(self._clock(), self._next)
            self._next = begins + self._spacing
            await self._sleep_until(begins)
            while self._clock() < self._paused_until:
                await self._sleep_until(self._paused_until)
            yield

    def pause(self, seconds: float) -> None:
        """Lets no call begin for so many seconds: a server that is too busy for one call is so for all."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    async def _sleep_until(self, time: float) -> None:
        if (seconds := time - self._clock()) > 0:
            await self._sleep(seconds)
