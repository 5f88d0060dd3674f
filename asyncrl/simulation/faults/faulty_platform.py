"""The machine of a trial, on which links, the network between hosts and processes fail.

Messages come late, twice, in another order or never, and links break; worker processes are tasks that can be killed at
any await.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from asyncrl.fleet.launching.launcher import InprocWorker
from asyncrl.fleet.worker.worker_runtime import run_worker
from asyncrl.fleet.worker.worker_spec import Addresses, WorkerSpec
from asyncrl.lanes.control.wire import HIGH_WATER, Frames, InprocCaller, InprocListener, InprocWire, Pipe
from asyncrl.lanes.host_id import HostId
from asyncrl.simulation.fakes.fake_service import now, quiet
from asyncrl.simulation.faults.fault_injection import FaultInjection
from asyncrl.simulation.faults.trial_plan import Fault

# The network between the hosts of a trial: messages of a partition come when it ends, and a dead host says nothing.
#
# TCP sends again what was lost, so that a partition delays messages; what ends a call or a connection meanwhile are
# its deadline and its heartbeats.


ANY = ""
"""Stands for every other host in a partition."""


class Partition(NamedTuple):
    """Messages from `source` to `target` do not pass before `end`."""

    source: str
    target: str
    end: float


class HostNetwork:
    """Knows which hosts reach which. dead: hosts that lost their power, and have not come back."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self._partitions: list[Partition] = []

    def separate(self, source: str, target: str, seconds: float, *, one_way: bool) -> None:
        """Keeps messages from one host to another back, and those the other way unless the loss is one-way."""
        end = now() + seconds
        self._partitions = [each for each in self._partitions if each.end > now()]
        self._partitions.append(Partition(source, target, end))
        if not one_way:
            self._partitions.append(Partition(target, source, end))

    def passes_at(self, source: str, target: str) -> float:
        """Returns when a message that is sent now gets from one host to another."""
        ends = [each.end for each in self._partitions if _concerns(each, source, target)]
        return max(ends, default=0.0) if source != target else 0.0

    def end_known_at(self, host: str, peer: str) -> float:
        """Returns when a peer learns that a connection to this host was closed there now."""
        return math.inf if host in self.dead else self.passes_at(host, peer)


def _concerns(partition: Partition, source: str, target: str) -> bool:
    return partition.source in (ANY, source) and partition.target in (ANY, target)


LATE_NOTICE = 15.0
"""Seconds after which the death of a remote process is known at the latest."""


class FaultyPipe(Pipe[Any]):
    """Delivers items after their latency; those of one sender stay in order unless a fault reorders them.

    peer: the caller that takes what is put here, b"" where the listener does. end_known_at: when the other end learns
    that the pipe was closed.
    """

    def __init__(self, name: str, faults: FaultInjection, wire: "FaultyWire") -> None:
        super().__init__(name)
        self.peer = b""
        self.end_known_at = 0.0
        self._faults = faults
        self._wire = wire
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
                self._wire.cut(self.name, peer)
            case Fault("cut"):
                self.close()
            case Fault("overtake"):
                self._travelling += 1
                at = max(now(), self._wire.passes_at(self.name, peer, self.peer)) + fault.seconds
                asyncio.get_running_loop().call_at(at, self._arrive, item)
            case Fault("delay"):
                self._send(peer, item, fault.seconds)
            case Fault("repeat"):
                self._send(peer, item, 0.0)
                self._send(peer, item, 0.0)
        return True

    def _send(self, peer: bytes, item: Any, delay: float) -> None:
        way = self._on_their_way.setdefault(peer, deque())
        at = max(now() + self._faults.latency(self.name) + delay, self._wire.passes_at(self.name, peer, self.peer))
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

    def close(self) -> None:
        if not self.closed and self.peer:
            self.end_known_at = self._wire.end_known_at(self.name, self.peer, to_caller=False)
        super().close()

    def hang_up(self) -> None:
        at = self._wire.end_known_at(self.name, self.peer, to_caller=True)
        if at < math.inf and not self._faults.hides_hang_up():
            asyncio.get_running_loop().call_at(max(at, now() + self._faults.latency(self.name)), self.close)


class FaultyListener(InprocListener):
    """Learns that a caller has closed its connection when the network says so; what it sends until then is lost."""

    def caller(self, peer: bytes) -> InprocCaller:
        unknown = {peer: caller for peer, caller in self._callers.items() if _is_unknown(caller)}
        made = super().caller(peer)
        self._callers |= unknown
        if isinstance(made.replies, FaultyPipe):
            made.replies.peer = peer
        return made

    def offer(self, peer: bytes, frames: Frames) -> bool:
        return _is_unknown(self._callers.get(peer)) or super().offer(peer, frames)


def _is_unknown(caller: InprocCaller | None) -> bool:
    """Returns whether a caller has closed its connection, and its listener does not know yet."""
    replies = caller.replies if caller is not None else None
    return isinstance(replies, FaultyPipe) and replies.closed and now() < replies.end_known_at


class FaultyWire(InprocWire):
    """Connects the processes of a trial through faulty pipes. network: between their hosts."""

    def __init__(self, faults: FaultInjection) -> None:
        super().__init__(lambda name: FaultyListener(name, lambda name: FaultyPipe(name, faults, self)))
        self.network = HostNetwork()
        self._hosts: dict[str | bytes, str] = {}

    def cut(self, address: str, peer: bytes) -> None:
        self._listeners[address].cut(peer)

    def note_host(self, endpoint: str | bytes, host: str) -> None:
        """Notes the host of a listener, by its address, or of a caller."""
        self._hosts[endpoint] = host

    def passes_at(self, address: str, sender: bytes, receiver: bytes) -> float:
        """Returns when a message that is sent now may arrive. sender, receiver: the caller, and b"" for the listener
        at this address."""
        source = self._hosts.get(sender or address, "")
        target = self._hosts.get(receiver or address, "")
        return self.network.passes_at(source, target)

    def end_known_at(self, address: str, peer: bytes, *, to_caller: bool) -> float:
        """Returns when a caller, or its listener, learns that the other one has closed their connection now."""
        caller = self._hosts.get(peer, "")
        listener = self._hosts.get(address, "")
        ends = (listener, caller) if to_caller else (caller, listener)
        return self.network.end_known_at(*ends)


@dataclass(slots=True)
class ProcessWire:
    """Makes the connections of one process, so that all of them are lost when the process dies. host: where it runs,
    in a trial with a network."""

    wire: FaultyWire
    host: str = ""
    _closed: bool = False
    _callers: list[InprocCaller] = field(default_factory=list)
    _listening: list[str] = field(default_factory=list)

    def connect(self, address: str) -> InprocCaller:
        self._callers = [caller for caller in self._callers if not caller.replies.closed]
        self._callers.append(self.wire.connect(address))
        self.wire.note_host(self._callers[-1].peer, self.host)
        if self._closed:
            self._callers[-1].close()
        return self._callers[-1]

    def listen(self, address: str) -> InprocListener:
        self._listening.append(address)
        self.wire.note_host(address, self.host)
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
        self.labels = {}  # No process id: the size of a message would depend on it.
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
    """Starts and kills workers on so many hosts. on_end: is called with the instance of each worker that ends. base:
    the one host of all these workers, in a trial with a network."""

    def __init__(
        self,
        wire: FaultyWire,
        seed: str,
        hosts: int,
        *,
        remote: bool,
        on_end: Callable[[str], None],
        base: str = "",
    ) -> None:
        self._wire = wire
        self._hosts = hosts
        self._base = base
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
            ProcessWire(self._wire, self._base),
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
        if self._base:
            return self._base
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
