"""Runs workers as tasks of this process: for tests, and for reward functions that no other process can import."""

import asyncio
import os
from collections.abc import Callable
from typing import Self

from asyncrl.errors import unwrap
from asyncrl.fleet.worker.compute_thread import Compute, Occupancy
from asyncrl.fleet.worker.worker_runtime import run_worker
from asyncrl.fleet.worker.worker_spec import Addresses, WorkerSpec
from asyncrl.lanes.control.inproc_wire import InprocWire
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.shared_memory import unlink_instance_segments


class InprocWorker:
    """A worker that is a task of this process. start: creates the task, which ends when its event is set."""

    def __init__(
        self, spec: WorkerSpec, inproc: InprocWire, start: Callable[[asyncio.Event], "asyncio.Task[None]"]
    ) -> None:
        self.pid = os.getpid()
        self._addresses = spec.addresses
        self._inproc = inproc
        self._stop = asyncio.Event()
        self.task = start(self._stop)

    async def wait(self) -> str:
        await asyncio.wait([self.task])
        return how_task_ended(self.task)

    def stop(self) -> None:
        self._stop.set()

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        """Severs the connections first, because a dead process sends nothing more, and then cancels the task."""
        for address in (self._addresses.control, self._addresses.work, self._addresses.data):
            self._inproc.sever(address)
        self.task.cancel()


def how_task_ended(worker: "asyncio.Task[None]") -> str:
    """Describes how the finished task of a worker ended."""
    if worker.cancelled():
        return "was killed"
    error = worker.exception()
    return "ended" if error is None else f"failed: {unwrap(error)!r}"


class InprocLauncher:
    """Owns the tasks of its workers; leaving it kills those that still run.

    wire: on which workers listen and connect; inproc: its part for addresses inside this process.
    """

    def __init__(self, wire: Wire, inproc: InprocWire, make_compute: Callable[[Occupancy], Compute]) -> None:
        self._wire = wire
        self._inproc = inproc
        self._make_compute = make_compute
        self._workers: list[InprocWorker] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
            await worker.wait()

    def addresses(self, instance: str) -> Addresses:
        return Addresses(*(f"inproc://{instance}.{lane}" for lane in ("control", "work", "data")))

    async def spawn(self, spec: WorkerSpec) -> InprocWorker:
        def start(stop: asyncio.Event) -> asyncio.Task[None]:
            running = run_worker(spec, self._wire, self._make_compute, stop)
            return asyncio.get_running_loop().create_task(running, name=spec.instance)

        self._workers = [worker for worker in self._workers if not worker.task.done()]
        self._workers.append(InprocWorker(spec, self._inproc, start))
        return self._workers[-1]

    def clean_up(self, spec: WorkerSpec) -> None:
        unlink_instance_segments(spec.facts.run, spec.facts.incarnation, spec.instance)
