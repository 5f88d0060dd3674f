"""Limits how many calls run at one time, and counts those that wait."""

import asyncio


class CallSlots:
    """Lets `count` calls run at one time: `async with slots`. waiting: number of calls that wait for a slot."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self.waiting = 0

    async def __aenter__(self) -> None:
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1

    async def __aexit__(self, *_: object) -> None:
        self._free.release()
