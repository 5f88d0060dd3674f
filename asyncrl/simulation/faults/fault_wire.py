"""A wire inside one process on which messages come late, twice, in another order or never, and links break."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.lanes.control.inproc_wire import InprocCaller, InprocListener, InprocWire, Pipe
from asyncrl.lanes.control.wire import HIGH_WATER
from asyncrl.simulation.fakes.fake_service import now
from asyncrl.simulation.faults.fault_injection import FaultInjection
from asyncrl.simulation.faults.trial_plan import Fault


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
