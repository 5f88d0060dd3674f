"""What workers are told without anybody waiting for the answer: which rows are done with, why generation idles."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

from asyncrl.errors import Retryable
from asyncrl.fleet import Fleet
from asyncrl.protocols.batch import Place
from asyncrl.together import together

T = TypeVar("T")


class Outbox(Generic[T]):
    """Notices of one kind to one service, sent from one task, those of one moment together.

    Each waits for its own service only: while one is started again, the others still hear which rows they may free.
    At most the places of all samples in flight wait here, which the gate bounds.
    """

    def __init__(self, send: Callable[[list[T]], Awaitable[None]]) -> None:
        self._send = send
        self._notices: list[T] = []
        self._changed = asyncio.Event()

    def put(self, notices: Iterable[T]) -> None:
        """To be sent soon, in this order."""
        self._notices.extend(notices)
        self._changed.set()

    async def run(self) -> None:
        """For ever: send what is there."""
        while True:
            await self._changed.wait()
            await self.flush()

    async def flush(self) -> None:
        """Send what is there now."""
        self._changed.clear()
        notices, self._notices = self._notices, []
        if not notices:
            return
        try:
            await self._send(notices)
        except Retryable:
            return  # A worker that died freed its rows by dying, and books no more time.
        except TimeoutError:
            self._notices[:0] = notices  # It lives: it is told again, with the next notice.


class Notices:
    """All outboxes of a run."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        holders = [fleet.generation, fleet.reference] if fleet.reference is not None else [fleet.generation]
        self._releases = [Outbox[Place](holder.release) for holder in holders]
        self._idle = Outbox[str](self._tell_why)
        self._told = "starved"
        self._outboxes: tuple[Outbox[Any], ...] = (*self._releases, self._idle)

    def release(self, places: Iterable[Place]) -> None:
        """The rows at these places are needed no more; each service picks out its own."""
        done_with = list(places)
        for outbox in self._releases:
            outbox.put(done_with)

    def idle_because(self, state: str) -> None:
        """Generation has nothing to do because the gate holds it back ("blocked") or nothing comes ("starved")."""
        self._idle.put([state])

    async def run(self) -> None:
        """For ever: send what is there."""
        await together(*(outbox.run() for outbox in self._outboxes))

    async def flush(self) -> None:
        """Send what is there now."""
        await together(*(outbox.flush() for outbox in self._outboxes))

    async def _tell_why(self, states: list[str]) -> None:
        if states[-1] != self._told:
            await self._fleet.generation.idle_because(states[-1])
            self._told = states[-1]
