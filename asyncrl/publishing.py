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
    """Announces the newest version to the generation service and tells the trainer who reads it.

    A version announced while another is on its way replaces those that wait: readers jump to the newest.
    A reader is attached to a version before it is told of it: else, while its answer is on the way, the trainer could
    overwrite what it reads. One that joined while others were told is told the next time. A reader that does not take
    over a version within `deadline` seconds keeps the trainer from writing, or has no weights to sample with; it is
    given to `evict`, to be killed.
    """

    def __init__(self, fleet: Fleet, deadline: float, observe: Observe, evict: Callable[[str], None]) -> None:
        self._fleet, self._deadline, self._observe, self._evict = fleet, deadline, observe, evict
        self._newest: Published | None = None
        self._changed = asyncio.Event()
        self._reading: dict[str, int] = {}
        self._joined: dict[str, None] = {}

    def join(self, reader: str) -> None:
        """This reader lives and has no weights yet; `announce` comes next."""
        self._joined[reader] = None

    def announce(self, published: Published) -> None:
        """Hand this version over; the same one again when a reader joined that does not have it."""
        self._newest = published
        self._changed.set()

    def forget(self, reader: str) -> None:
        """This reader died."""
        self._reading.pop(reader, None)
        self._joined.pop(reader, None)

    async def run(self) -> None:
        """For ever: hand over what was announced last."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            assert self._newest is not None, "set by announce"
            await self._hand_over(self._newest)

    async def _hand_over(self, published: Published) -> None:
        began = asyncio.get_running_loop().time()
        try:
            await self._attach(published)
            async with asyncio.timeout(self._deadline):
                using = await self._fleet.generation.use_weights(replace(published, readers=tuple(self._reading)))
            await self._relay(using)
        except Retryable:
            return  # Whoever keeps the fleet knows of the death; a reader that takes its place is announced to.
        except Refused:
            return  # Overwritten before a late joiner could hold it; the newer version is announced already.
        except TimeoutError:
            self._overdue(published, asyncio.get_running_loop().time() - began)
            return
        self._observe(WeightsHandedOver(using.version, using.readers, asyncio.get_running_loop().time() - began))

    async def _attach(self, published: Published) -> None:
        """Those that joined since hold this version from now on, so that it is not overwritten under them."""
        for reader in list(self._joined):
            await self._fleet.training.using(reader, published.version)
            if reader in self._joined:
                del self._joined[reader]
                self._reading[reader] = NOTHING_YET

    async def _relay(self, using: Using) -> None:
        """To the trainer, for those that have not died since they answered."""
        for reader in using.readers:
            if reader in self._reading:
                self._reading[reader] = using.version
                await self._fleet.training.using(reader, using.version)

    def _overdue(self, published: Published, seconds: float) -> None:
        holders = tuple(sorted(reader for reader, version in self._reading.items() if version < published.version))
        self._observe(WeightsOverdue(published.version, holders, seconds))
        for reader in holders:
            self._evict(reader)
        self._changed.set()  # Who only did not hear of it, or answered too late, has to be told again.
