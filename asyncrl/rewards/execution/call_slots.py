"""Who of many calls may run, and how many wait."""

import asyncio


class Places:
    """`async with` it to run at one of `count` places. waiting: how many have none yet."""

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
