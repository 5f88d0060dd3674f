"""Calls that the run does not wait for: which rows workers may free, and why generation is idle."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from asyncrl.concurrency import gather
from asyncrl.controller.observers.recorder import ShownRows
from asyncrl.errors import DeadlineExceeded, Retryable
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import SampleName
from asyncrl.protocols.service_contracts import Contract

T = TypeVar("T")


@dataclass
class ReleaseQueue(Generic[T]):
    """Sends items to one service, all items of one moment in one call, whether or not other services answer.

    acknowledged: called when some items were answered.
    """

    send: Callable[[list[T]], Awaitable[None]]
    acknowledged: Callable[[], None]

    def __post_init__(self) -> None:
        self._waiting: list[T] = []
        self._sent: list[T] = []
        self._changed = asyncio.Event()

    @property
    def unacknowledged(self) -> int:
        return len(self._waiting) + len(self._sent)

    def put(self, items: Iterable[T]) -> None:
        self._waiting.extend(items)
        self._changed.set()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            await self.flush()

    async def flush(self) -> None:
        self._changed.clear()
        self._sent = self._waiting
        self._waiting = []
        if not self._sent:
            return
        try:
            await self.send(self._sent)
        except Retryable:
            pass  # The worker died, and its rows with it.
        except DeadlineExceeded:
            self._waiting[:0] = self._sent  # The worker lives, so the items are sent again.
            self._changed.set()
        finally:
            self._sent = []
        self.acknowledged()


class RowReleases:
    """Queues the rows that services may free. oldest: returns the first group in flight. rewards_stored: whether the
    reward service has rows, too. shown: samples whose rows are read once more after their training.

    A name stays queued until its service has answered or died. The sample tracker adds names; the Controller runs it.
    """

    def __init__(
        self,
        fleet: Fleet,
        oldest: Callable[[], int],
        acknowledged: Callable[[], None],
        shown: ShownRows | None = None,
        *,
        rewards_stored: bool = False,
    ) -> None:
        self._fleet = fleet
        self._oldest = oldest
        self._shown = ShownRows() if shown is None else shown
        self._shown.released_by(self._put)
        rewards = fleet.reward if rewards_stored else None
        makers = (fleet.generation, fleet.environment, rewards, fleet.reference, fleet.critic, fleet.cost_critic)
        self._releases = [ReleaseQueue(partial(self._release, maker), acknowledged) for maker in filter(None, makers)]
        self._idle = ReleaseQueue[str](self._send_idle_reason, acknowledged=lambda: None)
        self._idle_reason = "starved"
        self._queues: tuple[ReleaseQueue[Any], ...] = (*self._releases, self._idle)

    @property
    def unreleased(self) -> int:
        """Returns the number of samples whose rows some service may still hold."""
        return max(queue.unacknowledged for queue in self._releases) + self._shown.waiting

    def release(self, samples: Iterable[SampleName]) -> None:
        """Lets every service free the rows of these samples, once nobody shows them any more."""
        if names := self._shown.take(samples):
            self._put(names)

    def _put(self, samples: Iterable[SampleName]) -> None:
        names = list(samples)
        for queue in self._releases:
            queue.put(names)

    def idle_because(self, reason: str) -> None:
        """Lets generation book idle time as held back by the gate ("blocked") or as without work ("starved")."""
        if reason != self._idle_reason or self._idle.unacknowledged:
            self._idle.put([reason])

    async def run(self) -> None:
        await gather(*(queue.run() for queue in self._queues))

    async def flush(self) -> None:
        await gather(*(queue.flush() for queue in self._queues))

    async def _release(self, holder: Contract, samples: list[SampleName]) -> None:
        await holder.release(samples, self._shown.oldest(self._oldest()))

    async def _send_idle_reason(self, reasons: list[str]) -> None:
        if reasons[-1] != self._idle_reason:
            await self._fleet.generation.idle_because(reasons[-1])
            self._idle_reason = reasons[-1]
