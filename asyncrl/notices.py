"""What workers are told without anybody waiting for the answer: which rows are done with, why generation idles."""

import asyncio
from collections.abc import Iterable

from asyncrl.errors import Retryable
from asyncrl.fleet import Fleet
from asyncrl.protocols.batch import Place


class Notices:
    """Collects notices and sends them from one task, those of one moment together.

    At most the places of all samples in flight wait here, which the gate bounds.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._places: list[Place] = []
        self._idle_because, self._told = "starved", "starved"
        self._changed = asyncio.Event()

    def release(self, places: Iterable[Place]) -> None:
        """The rows at these places are needed no more."""
        self._places.extend(places)
        self._changed.set()

    def idle_because(self, state: str) -> None:
        """Generation has nothing to do because the gate holds it back ("blocked") or nothing comes ("starved")."""
        self._idle_because = state
        self._changed.set()

    async def run(self) -> None:
        """For ever: send what is there."""
        while True:
            await self._changed.wait()
            await self.flush()

    async def flush(self) -> None:
        """Send what is there now."""
        self._changed.clear()
        places, self._places = self._places, []
        try:
            if places:
                await self._release(places)
            if self._told != self._idle_because:
                self._told = self._idle_because
                await self._fleet.generation.idle_because(self._told)
        except Retryable:
            return  # A worker that died freed its rows by dying, and books no more time.

    async def _release(self, places: list[Place]) -> None:
        await self._fleet.generation.release(places)
        if self._fleet.reference is not None:
            await self._fleet.reference.release(places)
