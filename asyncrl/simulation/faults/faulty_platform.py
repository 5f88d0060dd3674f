"""The machine of a trial, on which links, processes and the disk fail.

Messages come late, twice, in another order or never, and links break; worker processes are tasks that can be killed at
any await; writes are slow, and a power cut tears records.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, Self, TypeVar

from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.fleet.launching.launcher import InprocWorker
from asyncrl.fleet.worker.worker_runtime import run_worker
from asyncrl.fleet.worker.worker_spec import Addresses, WorkerSpec
from asyncrl.lanes.control.inproc_wire import InprocCaller, InprocListener, InprocWire, Pipe
from asyncrl.lanes.control.wire import HIGH_WATER
from asyncrl.lanes.host_id import HostId
from asyncrl.simulation.fakes.fake_service import now
from asyncrl.simulation.fakes.virtual_clock_and_log import quiet
from asyncrl.simulation.faults.fault_injection import FaultInjection
from asyncrl.simulation.faults.trial_plan import Fault

P = ParamSpec("P")
R = TypeVar("R")

LATE_NOTICE = 15.0
"""Seconds after which the death of a remote process is known at the latest."""
SLOW_WRITES = 20
"""Number of writes that one fault slows down."""


class FaultyPipe(Pipe[Any]):
    """Delivers items after their latency; those of one sender stay in order unless a fault reorders them."""

    def __init__(self, name: str, faults: FaultInjection, cut: Callable[[str, bytes], None]) -> None:
        super().__init__(name)
        self._faults = faults
        self._cut = cut
        self._on_their_way: dict[bytes, deque[tuple[float, Any]]] = {}
        self._travelling = 0

    def put(self, item: Any) -> bool:
        if self.closed:
            return True  # The item is lost: the sender does not know yet that the pipe is closed.
        if len(self._items) + self._travelling >= HIGH_WATER:
            return False
        # An item from a caller is (its name, frames), an item to a caller is its frames.
        peer, frames = item if isinstance(item, tuple) else (b"", item)
        fault = self._faults.fault_of_message(self.name, sum(len(frame) for frame in frames))
        match fault:
            case None:
                self._send(peer, item, 0.0)
            case Fault("lose"):
                pass
            case Fault("cut") if peer:
                self._cut(self.name, peer)
            case Fault("cut"):
                self.close()
            case Fault("overtake"):
                self._travelling += 1
                asyncio.get_running_loop().call_later(fault.seconds, self._arrive, item)
            case Fault("delay"):
                self._send(peer, item, fault.seconds)
            case Fault("repeat"):
                self._send(peer, item, 0.0)
                self._send(peer, item, 0.0)
        return True

    def _send(self, peer: bytes, item: Any, delay: float) -> None:
        way = self._on_their_way.setdefault(peer, deque())
        at = now() + self._faults.latency(self.name) + delay
        if way:
            at = max(at, way[-1][0])
        self._travelling += 1
        if at == now() and not way:
            return self._arrive(item)
        way.append((at, item))
        asyncio.get_running_loop().call_at(at, self._arrive_first, way)

    def _arrive_first(self, way: deque[tuple[float, Any]]) -> None:
        """Delivers the oldest item, because timers that are due at the same time run in no fixed order."""
        self._arrive(way.popleft()[1])

    def _arrive(self, item: Any) -> None:
        self._travelling -= 1
        if not self.closed:
            self._items.append(item)
            self._arrived.wake()

    def hang_up(self) -> None:
        if not self._faults.hides_hang_up():
            asyncio.get_running_loop().call_later(self._faults.latency(self.name), self.close)


class FaultyWire(InprocWire):
    """Connects one fleet through faulty pipes."""

    def __init__(self, faults: FaultInjection) -> None:
        super().__init__(lambda name: FaultyPipe(name, faults, self._cut))

    def _cut(self, address: str, peer: bytes) -> None:
        self._listeners[address].cut(peer)


@dataclass(slots=True)
class ProcessWire:
    """Makes the connections of one process, so that all of them are lost when the process dies."""

    wire: InprocWire
    _closed: bool = False
    _callers: list[InprocCaller] = field(default_factory=list)
    _listening: list[str] = field(default_factory=list)

    def connect(self, address: str) -> InprocCaller:
        self._callers = [caller for caller in self._callers if not caller.replies.closed]
        self._callers.append(self.wire.connect(address))
        if self._closed:
            self._callers[-1].close()
        return self._callers[-1]

    def listen(self, address: str) -> InprocListener:
        self._listening.append(address)
        return self.wire.listen(address)

    def close(self) -> None:
        """Closes all connections of a dead process: no message of its remaining tasks arrives anywhere."""
        self._closed = True
        for caller in self._callers:
            caller.close()
        for address in self._listening:
            self.wire.sever(address)


class FaultyProcess(InprocWorker):
    """Runs a worker as a task. deaf: it ignores a request to stop. notice: seconds until its death is known."""

    def __init__(self, spec: WorkerSpec, wire: ProcessWire, host: HostId, *, deaf: bool, notice: float) -> None:
        super().__init__(spec, lambda stop: run_worker(spec, wire, stop, quiet), wire.close, host)
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


class FaultyLauncher:
    """Starts and kills workers on so many hosts. on_end: is called with the instance of each worker that ends."""

    def __init__(self, wire: FaultyWire, seed: str, hosts: int, *, remote: bool, on_end: Callable[[str], None]) -> None:
        self._wire = wire
        self._hosts = hosts
        self._remote = remote
        self._on_end = on_end
        self._chance = random.Random(seed)
        self._processes: list[FaultyProcess] = []
        self._gone: list[FaultyProcess] = []

    async def spawn(self, spec: WorkerSpec) -> FaultyProcess:
        spec = replace(spec, addresses=Addresses.inproc(spec.instance))
        slot = (spec.replica, spec.rank)
        others = [process.spec for process in self._running(spec.service)]
        before = [other.instance for other in others if (other.replica, other.rank) == slot]
        assert not before, f"{spec.instance} is started while {before} still run"
        late = self._remote and self._chance.random() < 0.3
        process = FaultyProcess(
            spec,
            ProcessWire(self._wire),
            HostId(self._host_of(spec)),
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

    def _host_of(self, spec: WorkerSpec) -> str:
        """Returns the host of a worker: replicas take the hosts in turn, and the trainer has one of its own."""
        return "trainer" if spec.service == "training" else f"host{spec.replica % self._hosts}"

    def kill_host(self, service: str) -> None:
        """Kills all workers on the host of some worker of this service."""
        if running := self._running(service):
            self.lose_host(self._chance.choice(running).host)

    def lose_host(self, host: HostId) -> None:
        for process in self._processes:
            if process.runs and process.host == host:
                process.kill()

    def kill_all(self) -> None:
        """Kills all workers, as happens when their parent dies."""
        for process in self._processes:
            process.kill()

    async def wait_until_idle(self) -> None:
        for process in (*self._processes, *self._gone):
            await process.clean_up()


class SlowDisk(MemoryStore):
    """Takes time for slow writes. An append blocks the loop meanwhile; what goes through `run` lets other tasks run."""

    skip: Callable[[float], None]
    """Lets time pass while nothing runs; set by the life of a controller that uses the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._slow_writes = 0
        self._seconds = 0.0

    def slow_down(self, seconds: float) -> None:
        self._slow_writes = SLOW_WRITES
        self._seconds = seconds

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        size = self.size
        if seconds := self._next_seconds():
            await asyncio.sleep(seconds)
        done = work(*args, **kwargs)
        self.synced = min(self.synced, size)  # What was appended meanwhile may be on the disk, or not.
        return done

    def append(self, data: bytes) -> None:
        self.block()
        super().append(data)

    def block(self) -> None:
        """Lets the time of one write pass while nothing else runs."""
        if seconds := self._next_seconds():
            self.skip(seconds)

    def _next_seconds(self) -> float:
        slow = self._slow_writes > 0
        self._slow_writes -= slow
        return self._seconds if slow else 0.0

    def after_failure(self, power_cut: bool, chance: random.Random) -> Self:
        """Returns what the next process finds. A power cut loses some or all unsynced bytes and may tear the tail."""
        if not power_cut:
            return self.after_death()
        kept = chance.choice((0, chance.randint(0, self.size), self.size))
        return self.after_power_cut(kept, chance.choice((b"", b"torn", chance.randbytes(9))))
