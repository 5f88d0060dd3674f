"""Checks at every event of a trial that no call, group or buffer exceeds its bound."""

import asyncio
from collections.abc import Callable, Mapping

from asyncrl.controller.observers.events import Event, GroupDrawn, GroupFinished
from asyncrl.fleet.replicas import RemoteWorker, Replicas
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import CREDIT
from asyncrl.protocols.contracts import Lane
from asyncrl.simulation.invariants import Invariants

CHECK_PERIOD = 5.0
"""Seconds between two checks of what may have been waiting too long."""


class TrialChecks:
    """Adds bounds on waiting to the invariants of every simulated run.

    call_limit: seconds that a call may be outstanding now. age_limit: seconds that a group may be in flight now.
    now: loop time without what the clock skipped. oldest_age: seconds that a group was in flight at most.
    """

    def __init__(
        self,
        invariants: Invariants,
        workers: Mapping[str, Replicas],
        call_limit: Callable[[], float],
        age_limit: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._invariants = invariants
        self._workers = [worker for replicas in workers.values() for worker in replicas]
        self._call_limit = call_limit
        self._age_limit = age_limit
        self._now = now
        self._drawn: dict[int, float] = {}
        self.oldest_age = 0.0

    def in_flight(self, groups: tuple[int, ...]) -> None:
        """Starts the age of groups that were in flight when the run was resumed."""
        self._drawn |= dict.fromkeys(groups, self._now())

    def observe(self, event: Event) -> None:
        self._invariants.observe(event)
        if isinstance(event, GroupDrawn):
            self._drawn[event.group] = self._now()
        if isinstance(event, GroupFinished):
            self._drawn.pop(event.group, None)
        self._check_ages()

    async def watch(self) -> None:
        """Checks until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._invariants.watch(), name="invariants")
            tasks.create_task(self._check_waits(), name="check waits")

    async def _check_waits(self) -> None:
        while True:
            await asyncio.sleep(CHECK_PERIOD)
            self._check_ages()
            for worker in self._workers:
                self._check_calls(worker)

    def _check_ages(self) -> None:
        group, drawn = next(iter(self._drawn.items()), (0, self._now()))
        self.oldest_age = max(self.oldest_age, self._now() - drawn)
        assert self.oldest_age <= self._age_limit(), f"group {group} has been in flight for {self.oldest_age:g} s"

    def _check_calls(self, worker: RemoteWorker) -> None:
        """Checks that every call to this worker ends in time, and that no link holds more calls than its credit."""
        now = asyncio.get_running_loop().time()
        for call in worker.outstanding.values():
            waited = now - call.since
            assert waited <= self._call_limit(), f"{call.method} has waited {waited:g} s for {worker.name}"
        for lane in Lane:
            link = worker._channels.get(lane)
            if isinstance(link, Client):
                waiting = len(link._pending) + len(link._abandoned)
                assert waiting <= CREDIT, f"{waiting} calls wait for {link.peer}, more than its credit"
