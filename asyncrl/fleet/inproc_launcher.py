"""Workers inside this process, the twin of worker processes: for tests, and for rewards without an importable name."""

import asyncio
import os
from collections.abc import Callable
from typing import Self

from asyncrl.compute import Compute, Occupancy
from asyncrl.errors import lone
from asyncrl.launch import Addresses, WorkerSpec
from asyncrl.memory import sweep_instance
from asyncrl.wire.ends import Wire
from asyncrl.wire.inproc import InprocWire
from asyncrl.worker import run_worker


class InprocWorker:
    """A worker that is a task of this process."""

    def __init__(
        self, spec: WorkerSpec, inproc: InprocWire, body: Callable[[asyncio.Event], "asyncio.Task[None]"]
    ) -> None:
        self.pid = os.getpid()
        self._addresses, self._inproc = spec.addresses, inproc
        self._stop = asyncio.Event()
        self.task = body(self._stop)

    async def wait(self) -> str:
        await asyncio.wait([self.task])
        return how_it_ended(self.task)

    def stop(self) -> None:
        self._stop.set()

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        """Its ends are severed first: a dead process says no goodbyes."""
        for address in (self._addresses.control, self._addresses.work, self._addresses.data):
            self._inproc.sever(address)
        self.task.cancel()


def how_it_ended(worker: "asyncio.Task[None]") -> str:
    """Of a worker that is a task and is done, in words."""
    if worker.cancelled():
        return "was killed"
    error = worker.exception()
    return "ended" if error is None else f"failed: {lone(error)!r}"


class InprocLauncher:
    """Owns the tasks of its workers; leaving it kills those that still run.

    wire: what workers listen and read on; inproc: the part of it that their own addresses belong to.
    """

    def __init__(self, wire: Wire, inproc: InprocWire, make_compute: Callable[[Occupancy], Compute]) -> None:
        self._wire, self._inproc, self._make_compute = wire, inproc, make_compute
        self._workers: list[InprocWorker] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
            await worker.wait()

    def addresses(self, instance: str) -> Addresses:
        return Addresses(*(f"inproc://{instance}.{lane}" for lane in ("control", "work", "data")))

    def spawn(self, spec: WorkerSpec) -> InprocWorker:
        def body(stop: asyncio.Event) -> asyncio.Task[None]:
            running = run_worker(spec, self._wire, self._make_compute, stop)
            return asyncio.get_running_loop().create_task(running, name=spec.instance)

        self._workers = [worker for worker in self._workers if not worker.task.done()]
        self._workers.append(InprocWorker(spec, self._inproc, body))
        return self._workers[-1]

    def bury(self, spec: WorkerSpec) -> None:
        sweep_instance(spec.facts.run, spec.facts.epoch, spec.instance)
