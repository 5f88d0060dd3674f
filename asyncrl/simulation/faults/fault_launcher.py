"""Launches the simulated worker processes of a trial: tasks that can be killed at any await."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from asyncrl.fleet.launcher import InprocWorker
from asyncrl.fleet.worker.compute_thread import InlineCompute
from asyncrl.fleet.worker.worker_runtime import Instruments, run_worker
from asyncrl.fleet.worker.worker_spec import Addresses, WorkerSpec
from asyncrl.simulation.fakes.fake_service import now
from asyncrl.simulation.faults.fault_wire import FaultyWire, ProcessWire
from asyncrl.telemetry.state_clock import StateClock
from asyncrl.telemetry.trace import Tracer

LATE_NOTICE = 15.0
"""Seconds after which the death of a remote process is known at the latest."""


class FaultyProcess(InprocWorker):
    """Runs a worker as a task. deaf: it ignores a request to stop. notice: seconds until its death is known."""

    def __init__(self, spec: WorkerSpec, wire: ProcessWire, *, deaf: bool, notice: float) -> None:
        super().__init__(spec, lambda stop: run_worker(spec, wire, InlineCompute, stop, quiet), wire.close)
        self._deaf = deaf
        self._notice = notice
        self._killed = False
        self._known = asyncio.get_running_loop().create_task(self._notify(), name=f"death notice of {spec.instance}")

    async def _notify(self) -> None:
        await asyncio.wait([self.task])
        self._sever()
        await asyncio.sleep(self._notice)

    async def wait(self) -> str:
        await asyncio.wait([self._known])
        return self.how_ended()

    @property
    def runs(self) -> bool:
        return not self.task.done() and not self._killed

    def stop(self) -> None:
        if not self._deaf:
            super().stop()

    def kill(self) -> None:
        self._killed = True
        super().kill()

    async def clean_up(self) -> None:
        self._known.cancel()
        await asyncio.wait([self.task, self._known])
        if not self.task.cancelled():
            self.task.exception()


@contextmanager
def quiet(spec: WorkerSpec) -> Iterator[Instruments]:
    """Opens instruments on virtual time that write nothing."""
    log = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger("CRITICAL"))
    yield Instruments(StateClock(now), Tracer(None, spec.instance), log)


class FaultyLauncher:
    """Starts and kills workers. on_end: is called with the instance of each worker that ends."""

    def __init__(self, wire: FaultyWire, seed: str, *, remote: bool, on_end: Callable[[str], None]) -> None:
        self._wire = wire
        self._remote = remote
        self._on_end = on_end
        self._chance = random.Random(seed)
        self._processes: list[FaultyProcess] = []
        self._gone: list[FaultyProcess] = []

    def addresses(self, instance: str) -> Addresses:
        return Addresses.inproc(instance)

    async def spawn(self, spec: WorkerSpec) -> FaultyProcess:
        slot = (spec.replica, spec.rank)
        others = [process.spec for process in self._running(spec.service)]
        before = [other.instance for other in others if (other.replica, other.rank) == slot]
        assert not before, f"{spec.instance} is started while {before} still run"
        late = self._remote and self._chance.random() < 0.3
        process = FaultyProcess(
            spec,
            ProcessWire(self._wire),
            deaf=self._chance.random() < 0.2,
            notice=self._chance.uniform(0, LATE_NOTICE) if late else 0.0,
        )
        process.task.add_done_callback(lambda _: self._on_end(spec.instance))
        self._processes.append(process)
        return process

    def clean_up(self, spec: WorkerSpec) -> None:
        self._gone += [process for process in self._processes if process.spec.instance == spec.instance]
        self._processes = [process for process in self._processes if process.spec.instance != spec.instance]

    def _running(self, service: str) -> list[FaultyProcess]:
        return [process for process in self._processes if process.spec.service == service and process.runs]

    def runs(self, instance: str) -> bool:
        return any(process.runs for process in self._processes if process.spec.instance == instance)

    def kill_one(self, service: str) -> None:
        if running := self._running(service):
            self._chance.choice(running).kill()

    def kill_all(self) -> None:
        """Kills all workers, as happens when their parent dies."""
        for process in self._processes:
            process.kill()

    async def wait_until_idle(self) -> None:
        for process in (*self._processes, *self._gone):
            await process.clean_up()
