"""Keeps workers alive: starts them, notices a death at once, restarts the worker or ends the fleet.

    spawn ──> connect ──> `started` ──> takes calls ──> dead ──> outstanding calls fail ──> pause ──> spawn
                                                         └──> trainer or critic, or MAX_DEATHS deaths: FleetFailed

A worker may take its whole start deadline to load; only the kernel or a broken connection tells that it is dead.
Cancelling `run` stops all workers.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, Self

from asyncrl.concurrency import gather
from asyncrl.errors import AsyncrlError, FleetFailed, PeerLost, unwrap
from asyncrl.fleet.launcher import Launcher, WorkerProcess
from asyncrl.fleet.lifecycle_events import FleetEvent, WorkerCleanedUp, WorkerLost, WorkerSpawned, WorkerStarted
from asyncrl.fleet.replicas import DEATH_NOTICE, Channel, RemoteWorker
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.protocols.contracts import Lane

MAX_DEATHS = 6
"""Deaths of one worker without a finished group in between that end the run, because the cause returns. One more than
crash attribution needs to find the group that crashes workers."""
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 8.0
LONG_LIFE = 60.0
"""Seconds of taking calls after which a death counts as the first of its kind, and not as part of a crash loop."""
STOP_STAGES = (("stop", 5.0), ("terminate", 2.0), ("kill", 2.0))
"""How a worker is ended, and seconds until the next stage; under 10 s in all."""


class DeathCounter:
    """Counts a worker's deaths and computes the pause before its restart. Times in seconds, of any clock."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.since_progress = 0
        self._last_dead = ""
        self._started_at: float | None = None

    def started(self, now: float) -> None:
        """Notes that an instance takes calls."""
        self._started_at = now

    def count(self, instance: str, now: float) -> bool:
        """Counts the death of an instance. Returns False when it was counted: process and connection both report it."""
        if instance == self._last_dead:
            return False
        lifetime = 0.0 if self._started_at is None else now - self._started_at
        self._last_dead = instance
        self._started_at = None
        self.in_a_row = 1 if lifetime >= LONG_LIFE else self.in_a_row + 1
        self.since_progress += 1
        return True

    def progressed(self) -> None:
        """Notes a finished group: the earlier deaths do not keep the run from going on."""
        self.since_progress = 0

    @property
    def pause(self) -> float | None:
        """Seconds until the restart, doubled from FIRST_PAUSE with each short life; None after too many deaths.

        Progress does not shorten it: another replica may make the progress while this worker dies at every start.
        """
        if self.since_progress >= MAX_DEATHS:
            return None
        doublings = min(self.in_a_row - 1, 10)
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**doublings)


class Connection(Protocol):
    """A channel to one instance for each lane; entering it says hello. lost: set when it broke, see `reason`."""

    lost: asyncio.Event

    @property
    def channels(self) -> Mapping[Lane, Channel]: ...

    @property
    def reason(self) -> str: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    def fail(self, reason: str) -> None:
        """Makes every outstanding call raise PeerLost now."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """A worker to keep alive. make_spec: makes its next instance. restart: whether the run survives its death."""

    worker: RemoteWorker
    make_spec: Callable[[], WorkerSpec]
    launcher: Launcher
    restart: bool


@dataclass(frozen=True, slots=True)
class RunningInstance:
    """An instance that was spawned and is not cleaned up yet."""

    spec: WorkerSpec
    process: WorkerProcess


class Supervisor:
    """Runs the workers of `slots`.

    Args:
        connect: makes the connection to an instance.
        emit: takes the events of workers; must not block.
        start_deadline: seconds from spawning an instance until it takes calls.
        resume: the command that resumes the run, for error messages.

    Attributes:
        instances: what is running now, by the worker's name.
    """

    def __init__(
        self,
        slots: list[WorkerSlot],
        connect: Callable[[WorkerSpec], Connection],
        emit: Callable[[FleetEvent], None],
        start_deadline: float,
        resume: str,
    ) -> None:
        self.instances: dict[str, RunningInstance] = {}
        self._slots = slots
        self._connect = connect
        self._emit = emit
        self._start_deadline = start_deadline
        self._resume = resume
        self._deaths = {slot.worker.name: DeathCounter() for slot in slots}
        self._never_started = {slot.worker.name for slot in slots}
        self._all_started = asyncio.Event()

    def progressed(self) -> None:
        """Notes a finished group."""
        for deaths in self._deaths.values():
            deaths.progressed()

    def kill(self, instance: str) -> None:
        """Kills this instance if it still runs; its worker is restarted."""
        for each in self.instances.values():
            if each.spec.instance == instance:
                each.process.kill()

    async def all_started(self) -> None:
        """Returns when every worker has taken calls once; each has its own start deadline."""
        await self._all_started.wait()

    async def run(self) -> None:
        """Keeps all workers alive until cancelled, then stops them.

        Raises:
            FleetFailed: a worker that is not restarted died, or another one too often.
            AsyncrlError: what a worker raised during its first start.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for slot in self._slots:
                    tasks.create_task(self._keep_alive(slot), name=f"supervision of {slot.worker.name}")
        except BaseExceptionGroup as errors:
            raise unwrap(errors) from None

    async def _keep_alive(self, slot: WorkerSlot) -> None:
        deaths = self._deaths[slot.worker.name]
        while True:
            reason = await self._run_instance(slot)
            if not slot.restart or deaths.pause is None:
                times = f" {MAX_DEATHS} times without a finished group in between" if slot.restart else ""
                raise FleetFailed(f"{slot.worker.name} died{times}: {reason}. Resume with: {self._resume}")
            await asyncio.sleep(deaths.pause)

    async def _run_instance(self, slot: WorkerSlot) -> str:
        """Runs one instance from its start to its cleanup; returns why it died."""
        spec = slot.make_spec()
        process = await slot.launcher.spawn(spec)
        self.instances[slot.worker.name] = RunningInstance(spec, process)
        self._emit(WorkerSpawned(spec.service, spec.instance))
        try:
            return await self._supervise(slot, spec, process)
        finally:
            await end_process(process)
            slot.launcher.clean_up(spec)
            del self.instances[slot.worker.name]
            self._emit(WorkerCleanedUp(spec.service, spec.instance))

    async def _supervise(self, slot: WorkerSlot, spec: WorkerSpec, process: WorkerProcess) -> str:
        connection = self._connect(spec)
        try:
            await gather(self._watch_process(slot, spec, process, connection), self._serve(slot, spec, connection))
        except AsyncrlError as error:
            return self._death_reason(slot, spec, error)
        raise AssertionError("both coroutines end with an error")

    async def _watch_process(
        self, slot: WorkerSlot, spec: WorkerSpec, process: WorkerProcess, connection: Connection
    ) -> None:
        reason = await process.wait()
        self._mark_lost(slot, spec, reason)
        connection.fail(reason)
        raise PeerLost(reason)

    async def _serve(self, slot: WorkerSlot, spec: WorkerSpec, connection: Connection) -> None:
        try:
            await self._serve_until_broken(slot, spec, connection)
        except PeerLost as broken:
            # If the process died, `_watch_process` reports that first, with the cause.
            await asyncio.sleep(DEATH_NOTICE)
            self._mark_lost(slot, spec, str(broken))
            raise

    async def _serve_until_broken(self, slot: WorkerSlot, spec: WorkerSpec, connection: Connection) -> None:
        async with connection:
            await connection.channels[Lane.CONTROL].call("started", (), self._start_deadline)
            self._deaths[slot.worker.name].started(asyncio.get_running_loop().time())
            slot.worker.connected(spec.instance, connection.channels)
            self._emit(WorkerStarted(spec.service, spec.instance))
            self._never_started.discard(slot.worker.name)
            if not self._never_started:
                self._all_started.set()
            await connection.lost.wait()
            raise PeerLost(connection.reason)

    def _mark_lost(self, slot: WorkerSlot, spec: WorkerSpec, reason: str) -> None:
        """Keeps new calls from this instance, before its outstanding calls fail and are repeated elsewhere."""
        deaths = self._deaths[slot.worker.name]
        if deaths.count(spec.instance, asyncio.get_running_loop().time()):
            slot.worker.lost(reason, restarting=slot.restart and deaths.pause is not None)
            self._emit(WorkerLost(spec.service, spec.instance, reason))

    def _death_reason(self, slot: WorkerSlot, spec: WorkerSpec, error: AsyncrlError) -> str:
        """Returns why an instance ended. Raises the error of a worker's first start, which the user has to see."""
        if slot.worker.name in self._never_started and not isinstance(error, PeerLost):
            raise error
        reason = str(error) if isinstance(error, PeerLost) else f"it could not start again: {error}"
        self._mark_lost(slot, spec, reason)
        return reason


async def end_process(process: WorkerProcess) -> None:
    """Ends a worker, stage by stage; returns when it is dead, or when it survived SIGKILL for its whole stage."""
    for stage, seconds in STOP_STAGES:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                getattr(process, stage)()
                await process.wait()
                return
