"""The wire inside one process, with weather: messages come late, twice, in another order or never, and links break."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from asyncrl.faulty.plan import Fault, Trial
from asyncrl.wire.ends import HIGH_WATER
from asyncrl.wire.inproc import InprocCaller, InprocListener, InprocWire, Pipe

MESSAGE_FAULTS = ("lose", "repeat", "overtake", "delay", "cut")


class Weather:
    """Says what becomes of each message, and lets the faults of a trial strike when their message is sent.

    strike: lets those strike that concern more than one message. broken: told the address to or from which a message
    was lost or repeated. sent: messages so far, of all wires of the trial.
    struck: faults so far. digest: of every message with its time.
    """

    def __init__(self, trial: Trial, strike: Callable[[Fault], None], broken: Callable[[str], None]) -> None:
        self.sent = 0
        self.struck: list[Fault] = []
        self.digest = sha256()
        self._chance = random.Random(f"weather {trial.seed}")
        self._latency, self._remote, self._strike = trial.latency, trial.remote, strike
        self._broken = broken
        self._faults: dict[int, list[Fault]] = {}
        for fault in trial.faults:
            self._faults.setdefault(fault.at, []).append(fault)
        self._stalled: dict[str, float] = {}

    def message(self, address: str, size: int) -> Fault | None:
        """A message sets out; the fault of its own, if there is one."""
        self.sent += 1
        self.digest.update(f"{now()!r} {address} {size}\n".encode())
        mine = None
        for fault in self._faults.pop(self.sent, ()):
            self.struck.append(fault)
            if fault.kind in MESSAGE_FAULTS:
                mine = fault
                if fault.kind in ("lose", "repeat"):
                    self._broken(address)
            else:
                self._strike(fault)
        return mine

    def latency(self, address: str) -> float:
        """Seconds that a message to or from this worker takes now."""
        seconds = self._chance.expovariate(1 / self._latency) if self._latency else 0.0
        for service, until in self._stalled.items():
            if f"//{service}" in address:
                seconds = max(seconds, until - now())
        return seconds

    def stall(self, service: str, seconds: float) -> None:
        """Nothing passes to or from its workers for so long."""
        self._stalled[service] = now() + seconds

    def clear_up(self) -> None:
        """Other workers, other wires."""
        self._stalled.clear()

    def silent(self) -> bool:
        """Whether nobody is told that this link broke: its host is gone too."""
        return self._remote and self._chance.random() < 0.5


class FaultyPipe(Pipe[Any]):
    """Items arrive later than they were put; those of one sender in order, unless a fault reorders them."""

    def __init__(self, name: str, weather: Weather, cut: Callable[[str, bytes], None]) -> None:
        super().__init__(name)
        self._weather, self._cut = weather, cut
        self._on_their_way: dict[bytes, deque[tuple[float, Any]]] = {}
        self._travelling = 0

    def put(self, item: Any) -> bool:
        if self.closed:
            return True  # Into the void: nobody has told the sender yet.
        if len(self._items) + self._travelling >= HIGH_WATER:
            return False
        # Of a caller: (its name, frames); to a caller: frames.
        peer, frames = item if isinstance(item, tuple) else (b"", item)
        fault = self._weather.message(self.name, sum(len(frame) for frame in frames))
        match fault:
            case None:
                self._send(peer, item, 0.0)
            case Fault("lose"):
                pass
            case Fault("cut"):
                self._break(peer)
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
        at = now() + self._weather.latency(self.name) + delay
        if way:
            at = max(at, way[-1][0])
        self._travelling += 1
        if at == now() and not way:
            return self._arrive(item)
        way.append((at, item))
        asyncio.get_running_loop().call_at(at, self._arrive_first, way)

    def _arrive_first(self, way: deque[tuple[float, Any]]) -> None:
        """Timers that are due at one time have no order; messages do."""
        self._arrive(way.popleft()[1])

    def _arrive(self, item: Any) -> None:
        self._travelling -= 1
        if not self.closed:
            self._items.append(item)
            self._arrived.wake()

    def _break(self, peer: bytes) -> None:
        if peer:
            self._cut(self.name, peer)
        else:
            self.close()

    def hang_up(self) -> None:
        if not self._weather.silent():
            asyncio.get_running_loop().call_later(self._weather.latency(self.name), self.close)


class FaultyWire(InprocWire):
    """One fleet's wire."""

    def __init__(self, weather: Weather) -> None:
        super().__init__(lambda name: FaultyPipe(name, weather, self._cut))

    def _cut(self, address: str, peer: bytes) -> None:
        """The link of one caller breaks."""
        self._ends[address].cut(peer)


class Part:
    """The ends that one process makes, so that they can be lost with it."""

    def __init__(self, wire: InprocWire) -> None:
        self._wire, self._closed = wire, False
        self._callers: list[InprocCaller] = []
        self._listening: list[str] = []

    def connect(self, address: str) -> InprocCaller:
        self._callers = [caller for caller in self._callers if not caller.replies.closed]
        self._callers.append(self._wire.connect(address))
        if self._closed:
            self._callers[-1].close()
        return self._callers[-1]

    def listen(self, address: str) -> InprocListener:
        self._listening.append(address)
        return self._wire.listen(address)

    def close(self) -> None:
        """The process is dead: nothing that its tasks still do is heard by anybody."""
        self._closed = True
        for caller in self._callers:
            caller.close()
        for address in self._listening:
            self._wire.sever(address)


def now() -> float:
    return asyncio.get_running_loop().time()
