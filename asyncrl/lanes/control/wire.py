"""The interface of every wire, a Caller (one peer) and a Listener (many peers), and the wire inside one process."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from asyncrl.errors import PeerLost

Frame = bytes | memoryview
Frames = Sequence[Frame]

CREDIT = 256
"""Calls that may be outstanding on one connection: the scoring of several groups, a few hundred bytes each."""

HIGH_WATER = 4 * CREDIT
"""Messages queued in one direction. A call has at most a request, a cancel, an item and a reply in flight; a sender
beyond that waits, within SEND_DEADLINE."""

DRAIN_BUDGET = 16
"""Messages received in a row before the loop runs other tasks. Taking and answering so many calls costs 2 ms, or 4 with
a garbage collection; 64 of them cost 5 to 19 ms. A smaller budget only raises the cost per message."""

SEND_DEADLINE = 10.0
"""Seconds a message waits for room in the queue of a peer that does not read."""

LIMIT_BYTES = 256 * 1024 * 1024
"""Largest message; a row of 100,000 tokens has about 2 MB, and one fetch asks for few rows."""

CALL_BYTES = 16 * 1024 * 1024
"""Largest frame of a call on TCP, where a stranger may send as much as a listener takes before the handshake fails. A
call that names 16,000 rows has 4 MB; what is large comes in answers, or in pieces."""

ZERO_COPY_BYTES = 256 * 1024
"""Size from which a frame is sent without a copy: handing a buffer over costs as much as copying this many bytes. The
sender must not change such an array afterwards."""


class Wakeup(asyncio.Event):
    """Wakes all tasks that wait at that moment; a later `wait` does not see an earlier `wake`."""

    def wake(self) -> None:
        self.set()
        self.clear()


class Caller(Protocol):
    """The connecting endpoint. room: wakes when the peer may have read."""

    address: str
    room: Wakeup

    def offer(self, frames: Frames) -> bool:
        """Sends now, or returns False when the peer's queue is full. Raises PeerLost."""
        ...

    async def pump(self, handle: Callable[[list[Frame]], None]) -> None:
        """Calls `handle` with the frames of each message that comes in, until `handle` raises. A flood lets other tasks
        run every DRAIN_BUDGET messages. Raises PeerLost once the peer is gone and all that it sent was handed over."""
        ...

    def close(self) -> None: ...


class Listener(Protocol):
    """The endpoint at `address` that many callers connect to. The wire gives each peer an id."""

    address: str
    room: Wakeup

    def offer(self, peer: bytes, frames: Frames) -> bool:
        """Sends now, or returns False when that peer's queue is full. Raises PeerLost when the peer is gone."""
        ...

    async def pump(self, handle: Callable[[tuple[bytes, list[Frame]]], None]) -> None:
        """Calls `handle` with (peer, frames), as the `pump` of a Caller does."""
        ...

    def close(self) -> None: ...


class Wire(Protocol):
    """Makes endpoints. Closing it closes every endpoint it made."""

    def connect(self, address: str) -> Caller:
        """Returns a connecting endpoint; the listener may come later."""
        ...

    def listen(self, address: str) -> Listener: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WireByScheme:
    """Sends `inproc://` addresses to one wire and all others to another."""

    inproc: Wire
    network: Wire

    def _wire(self, address: str) -> Wire:
        return self.inproc if address.startswith("inproc://") else self.network

    def connect(self, address: str) -> Caller:
        return self._wire(address).connect(address)

    def listen(self, address: str) -> Listener:
        return self._wire(address).listen(address)

    def close(self) -> None:
        self.inproc.close()
        self.network.close()


# The wire inside one process: the twin of the ZeroMQ sockets, for tests, simulation and single-process fleets.


T = TypeVar("T")

FEW_LISTENERS = 64
"""Listeners among which closed ones are not looked for; then only when their number has doubled since the last time."""


class Pipe(Generic[T]):
    """One direction of a connection, at most HIGH_WATER items. Items from before `close` can still be taken."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self.room = Wakeup()
        self._items: deque[T] = deque()
        self._arrived = Wakeup()

    def put(self, item: T) -> bool:
        if self.closed:
            raise PeerLost(f"{self.name} is closed")
        if len(self._items) >= HIGH_WATER:
            return False
        self._items.append(item)
        self._arrived.wake()
        return True

    async def pump(self, handle: Callable[[T], None]) -> None:
        """Implements `pump` of wire.Caller."""
        in_a_row = 0
        while True:
            if not self._items:
                if self.closed:
                    raise PeerLost(f"{self.name} is closed")
                in_a_row = 0
                await self._arrived.wait()
            elif in_a_row == DRAIN_BUDGET:
                in_a_row = 0
                await asyncio.sleep(0)
            else:
                in_a_row += 1
                self.room.wake()
                handle(self._items.popleft())

    def close(self) -> None:
        self.closed = True
        self._arrived.wake()
        self.room.wake()

    def hang_up(self) -> None:
        """Notes that the putting endpoint is gone."""
        self.close()


def _owned(frames: Frames) -> list[Frame]:
    """Copies small frames and shares large ones, as a socket does."""
    return [bytes(frame) if len(frame) < ZERO_COPY_BYTES else frame for frame in frames]


@dataclass(eq=False, slots=True)
class InprocCaller:
    """The connecting endpoint; see wire.Caller."""

    address: str
    room: Wakeup
    peer: bytes
    inbox: Pipe[tuple[bytes, list[Frame]]]
    replies: Pipe[list[Frame]]

    def offer(self, frames: Frames) -> bool:
        if self.replies.closed:
            raise PeerLost(f"{self.address} is closed")
        return self.inbox.put((self.peer, _owned(frames)))

    async def pump(self, handle: Callable[[list[Frame]], None]) -> None:
        await self.replies.pump(handle)

    def close(self) -> None:
        self.replies.close()


class InprocListener:
    """The listening end, as `Listener` says."""

    def __init__(self, address: str, make_pipe: Callable[[str], Pipe[Any]] = Pipe) -> None:
        self.address = address
        self.room = Wakeup()
        self.bound = False
        self.inbox: Pipe[tuple[bytes, list[Frame]]] = make_pipe(address)
        self._make_pipe = make_pipe
        self._callers: dict[bytes, InprocCaller] = {}

    def caller(self, peer: bytes) -> InprocCaller:
        self._callers = {peer: caller for peer, caller in self._callers.items() if not caller.replies.closed}
        replies = self._make_pipe(self.address)
        replies.room = self.room
        self._callers[peer] = InprocCaller(self.address, self.inbox.room, peer, self.inbox, replies)
        return self._callers[peer]

    def offer(self, peer: bytes, frames: Frames) -> bool:
        if peer not in self._callers or self._callers[peer].replies.closed:
            self._callers.pop(peer, None)
            raise PeerLost(f"caller {peer.hex()} of {self.address} is gone")
        return self._callers[peer].replies.put(_owned(frames))

    async def pump(self, handle: Callable[[tuple[bytes, list[Frame]]], None]) -> None:
        await self.inbox.pump(handle)

    def cut(self, peer: bytes) -> None:
        """Breaks the connection of this caller; both endpoints stay open."""
        if peer in self._callers:
            self._callers[peer].replies.close()

    def close(self) -> None:
        self.inbox.close()
        for caller in self._callers.values():
            caller.replies.hang_up()


class InprocWire:
    """A namespace of addresses `inproc://NAME`; wires are independent of each other."""

    def __init__(self, make_listener: Callable[[str], InprocListener] = InprocListener) -> None:
        self._make_listener = make_listener
        self._listeners: dict[str, InprocListener] = {}
        self._forget_closed_at = FEW_LISTENERS
        self._peers = 0

    def _listener(self, address: str) -> InprocListener:
        if address not in self._listeners or self._listeners[address].inbox.closed:
            if len(self._listeners) >= self._forget_closed_at:
                self._listeners = {name: each for name, each in self._listeners.items() if not each.inbox.closed}
                self._forget_closed_at = 2 * len(self._listeners) + FEW_LISTENERS
            self._listeners[address] = self._make_listener(address)
        return self._listeners[address]

    def connect(self, address: str) -> InprocCaller:
        self._peers += 1
        return self._listener(address).caller(self._peers.to_bytes(5, "big"))

    def listen(self, address: str) -> InprocListener:
        listener = self._listener(address)
        if listener.bound:
            raise OSError(f"{address} is already in use")
        listener.bound = True
        return listener

    def sever(self, address: str) -> None:
        """Closes the endpoint of a killed process, which sends no last message."""
        self._listener(address).close()

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
