"""Worker processes of the faulty world: tasks that are killed at any await, and are heard of no more."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from asyncrl.compute import InlineCompute
from asyncrl.faulty.wire import FaultyWire, Part, now
from asyncrl.inproc_launcher import how_it_ended
from asyncrl.launch import Addresses, WorkerSpec
from asyncrl.telemetry.clock import StateClock
from asyncrl.telemetry.trace import Tracer
from asyncrl.worker import Instruments, run_worker

LATE_NOTICE = 15.0
"""Seconds at most until the death of a remote process is known."""


class FaultyProcess:
    """A worker. deaf: it does not listen when it is asked to stop. notice: seconds until its death is known."""

    pid = 4711

    def __init__(self, spec: WorkerSpec, part: Part, *, deaf: bool, notice: float) -> None:
        self.spec, self._part, self._deaf, self._notice = spec, part, deaf, notice
        self._stop = asyncio.Event()
        self.killed = False
        running = run_worker(spec, part, InlineCompute, self._stop, quiet)
        self.task = asyncio.get_running_loop().create_task(running, name=spec.instance)
        self._known = asyncio.get_running_loop().create_task(self._notify(), name=f"death notice of {spec.instance}")

    async def _notify(self) -> None:
        await asyncio.wait([self.task])
        self._part.close()
        await asyncio.sleep(self._notice)

    async def wait(self) -> str:
        await asyncio.wait([self._known])
        return how_it_ended(self.task)

    @property
    def runs(self) -> bool:
        return not self.task.done() and not self.killed

    def stop(self) -> None:
        if not self._deaf:
            self._stop.set()

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        """The wire is severed first: a dead process says no goodbyes."""
        self.killed = True
        self._part.close()
        self.task.cancel()

    async def buried(self) -> None:
        """Returns when no task of it is left."""
        self._known.cancel()
        await asyncio.wait([self.task, self._known])
        if not self.task.cancelled():
            self.task.exception()


@contextmanager
def quiet(spec: WorkerSpec) -> Iterator[Instruments]:
    """Instruments on virtual time that write nothing."""
    log = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger("CRITICAL"))
    yield Instruments(StateClock(now), Tracer(None, spec.instance), log)


class FaultyLauncher:
    """Starts workers. on_kill: told an instance that is dead from now on."""

    def __init__(self, wire: FaultyWire, seed: str, *, remote: bool, on_end: Callable[[str], None]) -> None:
        self._wire, self._remote, self._on_end = wire, remote, on_end
        self._chance = random.Random(seed)
        self._processes: list[FaultyProcess] = []
        self._gone: list[FaultyProcess] = []

    def addresses(self, instance: str) -> Addresses:
        return Addresses(*(f"inproc://{instance}.{lane}" for lane in ("control", "work", "data")))

    def spawn(self, spec: WorkerSpec) -> FaultyProcess:
        before = [process.spec.instance for process in self.running(spec.service) if _same_post(process.spec, spec)]
        assert not before, f"{spec.instance} is started while {before} still run"
        late = self._remote and self._chance.random() < 0.3
        process = FaultyProcess(
            spec,
            Part(self._wire),
            deaf=self._chance.random() < 0.2,
            notice=self._chance.uniform(0, LATE_NOTICE) if late else 0.0,
        )
        process.task.add_done_callback(lambda _: self._on_end(spec.instance))
        self._processes.append(process)
        return process

    def bury(self, spec: WorkerSpec) -> None:
        self._gone += [process for process in self._processes if process.spec.instance == spec.instance]
        self._processes = [process for process in self._processes if process.spec.instance != spec.instance]

    def running(self, service: str) -> list[FaultyProcess]:
        """Its processes, oldest first."""
        return [process for process in self._processes if process.spec.service == service and process.runs]

    def runs(self, instance: str) -> bool:
        return any(process.runs for process in self._processes if process.spec.instance == instance)

    def kill_one(self, service: str) -> None:
        """Any of its workers."""
        if running := self.running(service):
            self._chance.choice(running).kill()

    def kill_all(self) -> None:
        """What happens to workers when their parent dies."""
        for process in self._processes:
            process.kill()

    async def buried(self) -> None:
        """Returns when nothing of them runs any more."""
        for process in (*self._processes, *self._gone):
            await process.buried()


def _same_post(one: WorkerSpec, other: WorkerSpec) -> bool:
    return (one.service, one.replica, one.rank) == (other.service, other.replica, other.rank)
