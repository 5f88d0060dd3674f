"""Lets a step in lockstep wait, with its passes computed, until the controller allows its update."""

import asyncio
from contextlib import suppress

PERIOD = 1.0
"""Seconds after which a wait counts as progress: fewer than the deadline of any call."""


class UpdatePermit:
    """Holds back the update of a step in lockstep, until the controller allows it. periods: of waiting, which count as
    progress: who has to be waited for hangs, if anybody does, and its own calls have deadlines."""

    def __init__(self) -> None:
        self.periods = 0
        self._allowed = (-1, -1)
        self._changed = asyncio.Event()

    def allow(self, incarnation: int, version: int) -> None:
        self._allowed = (incarnation, version)
        self._changed.set()

    async def wait(self, incarnation: int, version: int) -> None:
        """Waits until a step from this version may change the weights, once."""
        while self._allowed != (incarnation, version):
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD):
                    await self._changed.wait()
            self.periods += 1
        self._allowed = (-1, -1)  # A step that trains nothing is tried again from the same version.
