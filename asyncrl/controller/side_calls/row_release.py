"""What workers are told without anybody waiting for the answer: which rows are done with, why generation idles."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Generic, TypeVar

from asyncrl.errors import Retryable
from asyncrl.fleet import Fleet
from asyncrl.protocols.batch import SampleName
from asyncrl.protocols.contracts import Contract
from asyncrl.together import together

T = TypeVar("T")


class Outbox(Generic[T]):
    """Notices of one kind to one service, sent from one task, those of one moment together.

    Each waits for its own service only: while one is started again, the others still hear which rows they may free.
    heard: told when some of them were answered.
    """

    def __init__(self, send: Callable[[list[T]], Awaitable[None]], heard: Callable[[], None]) -> None:
        self._send, self._heard = send, heard
        self._notices: list[T] = []
        self._sent: list[T] = []
        self._changed = asyncio.Event()

    @property
    def unheard(self) -> int:
        """Notices that no answer has come to."""
        return len(self._notices) + len(self._sent)

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
        self._sent, self._notices = self._notices, []
        if not self._sent:
            return
        try:
            await self._send(self._sent)
        except Retryable:
            pass  # A worker that died freed its rows by dying, and books no more time.
        except TimeoutError:
            self._notices[:0] = self._sent  # It lives: it is told again.
            self._changed.set()
        finally:
            self._sent = []
        self._heard()


class Notices:
    """All outboxes of a run. oldest: the first group in flight. heard: told when room for rows may have come."""

    def __init__(self, fleet: Fleet, oldest: Callable[[], int], heard: Callable[[], None]) -> None:
        self._fleet, self._oldest = fleet, oldest
        makers = (fleet.generation, fleet.reference, fleet.critic, fleet.cost_critic)
        holders = [each for each in makers if each is not None]
        self._releases = [Outbox[SampleName](partial(self._release, holder), heard) for holder in holders]
        self._idle = Outbox[str](self._tell_why, heard=lambda: None)
        self._told = "starved"
        self._outboxes: tuple[Outbox[Any], ...] = (*self._releases, self._idle)

    @property
    def unreleased(self) -> int:
        """Samples whose rows some service may still keep because it has yet to hear that they are done with."""
        return max(outbox.unheard for outbox in self._releases)

    def release(self, samples: Iterable[SampleName]) -> None:
        """The rows of these samples are needed no more."""
        done_with = list(samples)
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

    async def _release(self, holder: Contract, samples: list[SampleName]) -> None:
        await holder.release(samples, self._oldest())

    async def _tell_why(self, states: list[str]) -> None:
        if states[-1] != self._told:
            await self._fleet.generation.idle_because(states[-1])
            self._told = states[-1]
