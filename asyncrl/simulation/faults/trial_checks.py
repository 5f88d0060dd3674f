"""What must hold at every event of the faulty world, beside the invariants of every simulated run."""

import asyncio
from collections.abc import Callable, Mapping

from asyncrl.events import Event, GroupDrawn, GroupFinished
from asyncrl.invariants import Invariants
from asyncrl.protocols.contracts import Lane
from asyncrl.wire.ends import CREDIT
from asyncrl.wire.link import Link
from asyncrl.workers import RemoteWorker, Workers

LOOKS = 5.0
"""Seconds between two looks at what may have been waiting too long."""


class Checks:
    """patience: seconds a call may be outstanding now. oldest: seconds a group may be in flight now. now: loop time
    less what the clock skipped."""

    def __init__(
        self,
        invariants: Invariants,
        workers: Mapping[str, Workers],
        patience: Callable[[], float],
        oldest: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._invariants, self._workers = invariants, [worker for each in workers.values() for worker in each]
        self._patience, self._oldest, self._now = patience, oldest, now
        self._drawn: dict[int, float] = {}
        self.eldest = 0.0

    def in_flight(self, groups: tuple[int, ...]) -> None:
        """Groups that were taken over when the run was resumed."""
        self._drawn |= dict.fromkeys(groups, self._now())

    def observe(self, event: Event) -> None:
        self._invariants.observe(event)
        if isinstance(event, GroupDrawn):
            self._drawn[event.group] = self._now()
        if isinstance(event, GroupFinished):
            self._drawn.pop(event.group, None)
        self._check_ages()

    async def watch(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._invariants.watch(), name="invariants")
            tasks.create_task(self._look(), name="looks at what waits")

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOKS)
            self._check_ages()
            for worker in self._workers:
                self._check_calls(worker)

    def _check_ages(self) -> None:
        group, drawn = next(iter(self._drawn.items()), (0, self._now()))
        self.eldest = max(self.eldest, self._now() - drawn)
        assert self.eldest <= self._oldest(), f"group {group} is in flight for {self.eldest:g} s"

    def _check_calls(self, worker: RemoteWorker) -> None:
        """Every wait has a deadline, every buffer a bound."""
        now = asyncio.get_running_loop().time()
        for call in worker.outstanding.values():
            waited = now - call.since
            assert waited <= self._patience(), f"{call.method} waits for {worker.name} since {waited:g} s"
        for lane in Lane:
            link = worker._channels.get(lane)
            if isinstance(link, Link):
                assert len(link._answers) + len(link._abandoned) <= CREDIT, f"too many calls wait for {link.peer}"
