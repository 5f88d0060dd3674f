"""What every wire offers: a Caller (one peer) and a Listener (many), and the bounds they share."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from asyncrl.errors import DeadlineExceeded

Frame = bytes | memoryview
Frames = Sequence[Frame]

CREDIT = 256
"""Calls that may be outstanding on one link: several groups' worth of scoring, each a few hundred bytes."""

HIGH_WATER = 4 * CREDIT
"""Messages queued one way. A call needs at most a request, a cancel, an item and a reply in flight; who wants to queue
more waits, within SEND_DEADLINE."""

DRAIN_BUDGET = 16
"""Messages received in a row before the loop runs its other tasks. To take and answer as many calls costs 2 ms of
computing, 4 with a garbage collection; 64 of them cost 5 and up to 19. Below 16 only the price per message changes."""

SEND_DEADLINE = 10.0
"""Seconds a message waits for room in the queue of a peer that does not read."""

LIMIT_BYTES = 256 * 1024 * 1024
"""Largest message; a row of 100,000 tokens has about 2 MB, and a fetch asks for few rows at a time."""

ZERO_COPY_BYTES = 256 * 1024
"""From here on a frame is sent without a copy: handing a buffer over costs as much as copying this many bytes. The
sender leaves such an array alone afterwards."""


class Caller(Protocol):
    """The end that connects. `receive` raises PeerLost once the other end is gone and everything it sent was taken."""

    address: str

    def offer(self, frames: Frames) -> bool:
        """Send now, or return False when the peer's queue is full. Raises PeerLost."""
        ...

    async def send(self, frames: Frames) -> None:
        """Send, waiting for room. Raises PeerLost, DeadlineExceeded after SEND_DEADLINE."""
        ...

    async def receive(self) -> list[Frame]: ...

    def close(self) -> None: ...


class Listener(Protocol):
    """The end that many callers connect to; `address` is what they connect to. Peers have ids that the wire gives."""

    address: str

    def offer(self, peer: bytes, frames: Frames) -> bool:
        """Send now, or return False when that peer's queue is full. Raises PeerLost when the peer is gone."""
        ...

    async def send(self, peer: bytes, frames: Frames) -> None: ...

    async def receive(self) -> tuple[bytes, list[Frame]]: ...

    def close(self) -> None: ...


@runtime_checkable
class Pouring(Protocol):
    """An end that hands messages over as they come in, without waking a task for each."""

    async def pour(self, take: Callable[..., None]) -> None:
        """Call `take` with what `receive` would return, until it raises what `receive` raises, or `take` does."""
        ...


async def pour(end: Caller | Listener, take: Callable[..., None]) -> None:
    """Give every message that comes in to `take`. Raises PeerLost, and what `take` raises."""
    if isinstance(end, Pouring):
        await end.pour(take)
    while True:
        take(await end.receive())


class Wire(Protocol):
    """Makes ends. Closing it closes every end it made."""

    def connect(self, address: str) -> Caller:
        """A caller's end; nobody needs to listen there yet."""
        ...

    def listen(self, address: str) -> Listener: ...

    def close(self) -> None: ...


class Signal:
    """Wakes everybody who waits at that moment; remembers nothing."""

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


class Turn:
    """Counts messages received in a row, so that a flood lets other tasks run every DRAIN_BUDGET messages."""

    def __init__(self) -> None:
        self._taken = 0

    async def next(self) -> None:
        self._taken += 1
        if self._taken > DRAIN_BUDGET:
            self._taken = 1
            await asyncio.sleep(0)

    def rest(self) -> None:
        """The receiver goes to sleep; the message that wakes it is the first of the next row."""
        self._taken = 1


async def send_when_room(offer: Callable[[], bool], room: Signal, holder: str) -> None:
    """Repeat `offer` whenever there may be room. Raises DeadlineExceeded naming who does not read."""
    try:
        async with asyncio.timeout(SEND_DEADLINE):
            while not offer():
                await room.wait()
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{holder} has not read for {SEND_DEADLINE:g} s: its queue of {HIGH_WATER} messages is full"
        ) from error


class Wires:
    """One wire for every scheme: `inproc://` goes to one, all others to the other."""

    def __init__(self, inproc: Wire, network: Wire) -> None:
        self._inproc, self._network = inproc, network

    def _wire(self, address: str) -> Wire:
        return self._inproc if address.startswith("inproc://") else self._network

    def connect(self, address: str) -> Caller:
        return self._wire(address).connect(address)

    def listen(self, address: str) -> Listener:
        return self._wire(address).listen(address)

    def close(self) -> None:
        self._inproc.close()
        self._network.close()
