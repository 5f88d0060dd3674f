"""The interface of every wire: a Caller (one peer) and a Listener (many peers), and the bounds they share."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from asyncrl.errors import DeadlineExceeded

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

ZERO_COPY_BYTES = 256 * 1024
"""Size from which a frame is sent without a copy: handing a buffer over costs as much as copying this many bytes. The
sender must not change such an array afterwards."""


class Caller(Protocol):
    """The connecting endpoint. `receive` raises PeerLost once the peer is gone and all that it sent was received."""

    address: str

    def offer(self, frames: Frames) -> bool:
        """Sends now, or returns False when the peer's queue is full. Raises PeerLost."""
        ...

    async def send(self, frames: Frames) -> None:
        """Sends, waiting for room. Raises PeerLost, DeadlineExceeded after SEND_DEADLINE."""
        ...

    async def receive(self) -> list[Frame]: ...

    def close(self) -> None: ...


class Listener(Protocol):
    """The endpoint at `address` that many callers connect to. The wire gives each peer an id."""

    address: str

    def offer(self, peer: bytes, frames: Frames) -> bool:
        """Sends now, or returns False when that peer's queue is full. Raises PeerLost when the peer is gone."""
        ...

    async def send(self, peer: bytes, frames: Frames) -> None: ...

    async def receive(self) -> tuple[bytes, list[Frame]]: ...

    def close(self) -> None: ...


@runtime_checkable
class MessagePump(Protocol):
    """An endpoint that hands messages over as they come in, without waking a task for each."""

    async def pump(self, handle: Callable[..., None]) -> None:
        """Calls `handle` with what `receive` would return, until `handle` raises, or what `receive` would raise."""
        ...


async def pump_messages(endpoint: Caller | Listener, handle: Callable[..., None]) -> None:
    """Passes every message that comes in to `handle`. Raises PeerLost, and what `handle` raises."""
    if isinstance(endpoint, MessagePump):
        await endpoint.pump(handle)
    while True:
        handle(await endpoint.receive())


class Wire(Protocol):
    """Makes endpoints. Closing it closes every endpoint it made."""

    def connect(self, address: str) -> Caller:
        """Returns a connecting endpoint; the listener may come later."""
        ...

    def listen(self, address: str) -> Listener: ...

    def close(self) -> None: ...


class Wakeup:
    """Wakes all tasks that wait at that moment; a later `wait` does not see an earlier `wake`."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            self._waiting.remove(future)

    def wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class DrainLimit:
    """Counts messages received in a row, so that a flood lets other tasks run every DRAIN_BUDGET messages."""

    def __init__(self) -> None:
        self._received = 0

    async def next(self) -> None:
        """Counts a message, and lets other tasks run when the budget is spent."""
        self._received += 1
        if self._received > DRAIN_BUDGET:
            self._received = 1
            await asyncio.sleep(0)

    def reset(self) -> None:
        """Starts a new row, with the message that ends the receiver's coming wait."""
        self._received = 1


async def send_when_room(offer: Callable[[], bool], room: Wakeup, holder: str) -> None:
    """Repeats `offer` whenever there may be room. Raises DeadlineExceeded naming the peer that does not read."""
    try:
        async with asyncio.timeout(SEND_DEADLINE):
            while not offer():
                await room.wait()
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{holder} has not read for {SEND_DEADLINE:g} s: its queue of {HIGH_WATER} messages is full"
        ) from error


class WireByScheme:
    """Sends `inproc://` addresses to one wire and all others to another."""

    def __init__(self, inproc: Wire, network: Wire) -> None:
        self._inproc = inproc
        self._network = network

    def _wire(self, address: str) -> Wire:
        return self._inproc if address.startswith("inproc://") else self._network

    def connect(self, address: str) -> Caller:
        return self._wire(address).connect(address)

    def listen(self, address: str) -> Listener:
        return self._wire(address).listen(address)

    def close(self) -> None:
        self._inproc.close()
        self._network.close()
