"""Checks that nothing in a trial waits for longer than its faults explain."""

import asyncio
from collections.abc import Iterable

from asyncrl.controller.journal.ledger import Drawn
from asyncrl.controller.observers.events import Event, GroupFinished
from asyncrl.fleet.fleet import RunningFleet
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import CREDIT
from asyncrl.protocols.service_contracts import Lane
from asyncrl.simulation.faults.fault_injection import AGE_LIMIT, CHECK_PERIOD, FaultInjection


class WaitChecks:
    """Checks the age of groups in flight at every event, and calls without an answer periodically. groups: in flight
    at the start. Raises AssertionError."""

    def __init__(self, faults: FaultInjection, groups: Iterable[int]) -> None:
        self._faults = faults
        self._drawn = dict.fromkeys(groups, faults.now())

    def observe(self, event: Event) -> None:
        if isinstance(event, Drawn):
            self._drawn[event.group] = self._faults.now()
        if isinstance(event, GroupFinished):
            self._drawn.pop(event.group, None)
        self._check_ages()

    async def watch(self, fleet: RunningFleet) -> None:
        """Checks until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_PERIOD)
            self._check_ages()
            for replicas in fleet.workers.values():
                for worker in replicas:
                    self._check_calls(worker)

    def _check_ages(self) -> None:
        group, drawn = next(iter(self._drawn.items()), (0, self._faults.now()))
        age = self._faults.now() - drawn
        # The limit of a trial is never below the common one, and this is asked at every event.
        if age > AGE_LIMIT:
            assert age <= self._faults.age_limit(), f"group {group} has been in flight for {age:g} s"

    def _check_calls(self, worker: RemoteWorker) -> None:
        """Checks that every call to this worker ends in time, and that no link holds more calls than its credit."""
        now = asyncio.get_running_loop().time()
        for call in worker.outstanding.values():
            waited = now - max(call.since, worker.last_answer_at)
            limit = self._faults.call_limit(call.method)
            assert waited <= limit, f"{call.method} has waited {waited:g} s for {worker.name}"
        for lane in Lane:
            link = worker.channels.get(lane)
            if isinstance(link, Client):
                waiting = len(link._pending) + len(link._abandoned)
                assert waiting <= CREDIT, f"{waiting} calls wait for {link.peer}, more than its credit"
