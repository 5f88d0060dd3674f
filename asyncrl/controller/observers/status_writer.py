"""Writes the state of the run for `asyncrl monitor`, every few seconds, beside the controller."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncrl.concurrency import to_its_end
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import IN_FLIGHT, Stage
from asyncrl.controller.journal.journal import Journal
from asyncrl.fleet.health import HealthPoller
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.protocols.messages import Health
from asyncrl.telemetry.run_status import (
    SECONDS,
    RunStatus,
    WorkerStatus,
    cores_between,
    rates_between,
    shares_between,
    write_status,
)


@dataclass
class StatusWriter:
    """Writes to `path`. journal: has the samples that ended, those before a resume too. steps: of the whole run. now:
    returns Unix time in seconds. publish: takes each state too. is_paused: returns whether a command paused the run."""

    path: Path
    gate: Gate
    journal: Journal
    poller: HealthPoller
    steps: int
    publish: Callable[[RunStatus], None] = lambda status: None
    is_paused: Callable[[], bool] = bool
    now: Callable[[], float] = time.time
    _before: dict[str, Health] = field(default_factory=dict)
    _instances: dict[str, str] = field(default_factory=dict)
    _starts: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """Runs until cancelled, when the run has ended."""
        try:
            while True:
                await self.write()
                await asyncio.sleep(SECONDS)
        finally:
            with suppress(OSError):
                write_status(self.path, replace(self.status(), ended=True))

    async def write(self) -> None:
        await self.poller.poll()
        status = self.status()
        self.publish(status)
        await to_its_end(self._replace(status))  # Or the last state, written meanwhile, would be overwritten.

    async def _replace(self, status: RunStatus) -> None:
        with suppress(OSError):  # Where the disk is full, the journal ends the run and says so.
            await asyncio.to_thread(write_status, self.path, status)

    def status(self) -> RunStatus:
        """Returns the present state, by the newest health of each worker."""
        ledger = self.journal.ledger
        counts = {stage.value: self.gate.counts[stage] for stage in IN_FLIGHT}
        counts |= {Stage.TRAINED.value: ledger.trained, Stage.DROPPED.value: ledger.dropped.total()}
        samples = {stage: count for stage, count in counts.items() if count}
        workers = tuple(self._worker(worker) for worker in self.poller.workers)
        moment = (self.now(), self.gate.version, self.steps, samples, workers)
        return RunStatus(*moment, incarnation=ledger.incarnation, paused=self.is_paused())

    def _worker(self, worker: RemoteWorker) -> WorkerStatus:
        if worker.instance and self._instances.get(worker.name) != worker.instance:
            self._instances[worker.name] = worker.instance
            self._starts[worker.name] += 1
        starts = self._starts[worker.name]
        problem = "" if worker.alive else worker.status
        newest = self.poller.newest.get(worker.name)
        if newest is None or newest.health.instance != worker.instance:
            name = worker.name
            instance = worker.instance
            return WorkerStatus(name, instance, problem, (), 0, {}, 0.0, 0, starts, {}, service=worker.service)
        health = newest.health
        before = self._before.get(worker.name)
        self._before[worker.name] = health
        return WorkerStatus(
            worker.name,
            worker.instance,
            problem,
            health.doing,
            health.queued,
            shares_between(before, health),
            cores_between(before, health),
            health.memory,
            starts,
            health.counters,
            rates_between(before, health),
            health.version,
            health.gpu,
            worker.service,
        )
