"""New weights on their way from the trainer to those that read them."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from asyncrl.errors import Refused, Retryable
from asyncrl.events import Observe, WeightsHandedOver, WeightsOverdue
from asyncrl.fleet import Fleet
from asyncrl.protocols.messages import Published, Using

NOTHING_YET = -1
"""Version that a reader reads which has taken over none."""


class Publisher:
    """Tells every reader of the newest version, each in a task of its own, and the trainer what each of them reads.

    A version announced while a reader takes over another replaces those that wait: readers jump to the newest.
    A reader is attached to a version before it is told of it: else, while its answer is on the way, the trainer could
    overwrite what it reads. A reader that does not take over a version within `deadline` seconds keeps the trainer
    from writing, or has no weights to sample with; it is given to `evict`, to be killed.
    """

    def __init__(self, fleet: Fleet, deadline: float, observe: Observe, evict: Callable[[str], None]) -> None:
        self._fleet, self._deadline, self._observe, self._evict = fleet, deadline, observe, evict
        self._newest: Published | None = None
        self._changed = asyncio.Event()
        self._reading: dict[str, int] = {}
        self._telling: dict[str, asyncio.Task[None]] = {}

    def join(self, reader: str) -> None:
        """This reader lives and has no weights yet; `announce` comes next."""
        self._reading[reader] = NOTHING_YET

    def announce(self, published: Published) -> None:
        """Hand this version over; the same one again when a reader joined that does not have it. One that is older than
        what was announced before was overtaken on its way here."""
        if self._newest is None or self._newest.version <= published.version:
            self._newest = published
        self._changed.set()

    def forget(self, reader: str) -> None:
        """This reader died."""
        self._reading.pop(reader, None)
        if (telling := self._telling.pop(reader, None)) is not None:
            telling.cancel()

    async def run(self) -> None:
        """For ever: tell those that read something older than what was announced last."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._changed.wait()
                self._changed.clear()
                assert self._newest is not None, "set by announce"
                for reader, version in self._reading.items():
                    if version < self._newest.version and reader not in self._telling:
                        self._telling[reader] = tasks.create_task(self._keep_up(reader), name=f"weights to {reader}")

    async def _keep_up(self, reader: str) -> None:
        """Until it was told of the newest version."""
        told = NOTHING_YET
        while reader in self._reading and self._newest is not None and told < self._newest.version:
            told = self._newest.version
            await self._hand_over(reader, self._newest)
        self._telling.pop(reader, None)

    async def _hand_over(self, reader: str, published: Published) -> None:
        began = asyncio.get_running_loop().time()
        try:
            if self._reading[reader] == NOTHING_YET:
                await self._attach(reader, published)
            using = await self._told(reader, published)
            if using is None:
                return self._overdue(reader, published, asyncio.get_running_loop().time() - began)
            if reader not in using.readers:
                return  # It goes on with what it reads.
            await self._relay(reader, using)
        except Retryable:
            return  # Whoever keeps the fleet knows of the death; a reader that takes its place is announced to.
        except Refused:
            return  # Overwritten before a late joiner could hold it; the newer version is announced already.
        seconds = asyncio.get_running_loop().time() - began
        self._observe(WeightsHandedOver(using.version, reader, seconds, using.canary))

    async def _attach(self, reader: str, published: Published) -> None:
        """It holds this version from now on, so that it is not overwritten under it."""
        await self._fleet.training.using(reader, published.version)

    async def _told(self, reader: str, published: Published) -> Using | None:
        """What it says to that; None: nothing in time. Its replica alone is asked: another one may be stuck."""
        replica = self._fleet.generation.replica_of(reader)
        try:
            async with asyncio.timeout(self._deadline):
                return await replica.use_weights(replace(published, readers=(reader,)))
        except TimeoutError:
            return None

    async def _relay(self, reader: str, using: Using) -> None:
        """To the trainer."""
        self._reading[reader] = using.version
        await self._fleet.training.using(reader, using.version)

    def _overdue(self, reader: str, published: Published, seconds: float) -> None:
        """It is told nothing more, and keeps its lease until it is surely dead."""
        del self._reading[reader]
        self._observe(WeightsOverdue(published.version, reader, seconds))
        self._evict(reader)
