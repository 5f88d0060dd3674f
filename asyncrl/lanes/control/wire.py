"""The interface of every wire: a Caller (one peer) and a Listener (many peers), and the bounds they share."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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
