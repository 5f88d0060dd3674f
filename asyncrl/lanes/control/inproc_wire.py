"""The wire inside one process: the twin of the ZeroMQ sockets, for tests, simulation and single-process fleets."""

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from asyncrl.errors import PeerLost
from asyncrl.wire.ends import HIGH_WATER, ZERO_COPY_BYTES, Frame, Frames, Signal, Turn, send_when_room

T = TypeVar("T")


class Pipe(Generic[T]):
    """One direction, at most HIGH_WATER items. What was put before the close can still be taken."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self.room = Signal()
        self._items: deque[T] = deque()
        self._arrived = Signal()
        self._turn = Turn()

    def put(self, item: T) -> bool:
        if self.closed:
            raise PeerLost(f"{self.name} is closed")
        if len(self._items) >= HIGH_WATER:
            return False
        self._items.append(item)
        self._arrived.wake()
        return True

    async def take(self) -> T:
        await self._turn.next()
        while not self._items:
            if self.closed:
                raise PeerLost(f"{self.name} is closed")
            self._turn.rest()
            await self._arrived.wait()
        self.room.wake()
        return self._items.popleft()

    def close(self) -> None:
        self.closed = True
        self._arrived.wake()
        self.room.wake()

    def hang_up(self) -> None:
        """The end that puts is gone."""
        self.close()


MakePipe = Callable[[str], Pipe[Any]]
"""From the address that the pipe belongs to."""


def _owned(frames: Frames) -> list[Frame]:
    """Small frames copied, large ones shared: what a socket does."""
    return [bytes(frame) if len(frame) < ZERO_COPY_BYTES else frame for frame in frames]


class InprocCaller:
    def __init__(
        self, address: str, peer: bytes, inbox: Pipe[tuple[bytes, list[Frame]]], replies: Pipe[list[Frame]]
    ) -> None:
        self.address, self.replies = address, replies
        self._peer, self._out = peer, inbox

    def offer(self, frames: Frames) -> bool:
        if self.replies.closed:
            raise PeerLost(f"{self.address} is closed")
        return self._out.put((self._peer, _owned(frames)))

    async def send(self, frames: Frames) -> None:
        if not self.offer(frames):
            await send_when_room(lambda: self.offer(frames), self._out.room, self.address)

    async def receive(self) -> list[Frame]:
        return await self.replies.take()

    def close(self) -> None:
        self.replies.close()


class InprocListener:
    def __init__(self, address: str, make_pipe: MakePipe = Pipe) -> None:
        self.address, self._make_pipe = address, make_pipe
        self.inbox: Pipe[tuple[bytes, list[Frame]]] = make_pipe(address)
        self.bound = False
        self._callers: dict[bytes, InprocCaller] = {}

    def caller(self, peer: bytes) -> InprocCaller:
        self._callers = {peer: caller for peer, caller in self._callers.items() if not caller.replies.closed}
        self._callers[peer] = InprocCaller(self.address, peer, self.inbox, self._make_pipe(self.address))
        return self._callers[peer]

    def _replies(self, peer: bytes) -> Pipe[list[Frame]]:
        if peer not in self._callers or self._callers[peer].replies.closed:
            self._callers.pop(peer, None)
            raise PeerLost(f"caller {peer.hex()} of {self.address} is gone")
        return self._callers[peer].replies

    def offer(self, peer: bytes, frames: Frames) -> bool:
        return self._replies(peer).put(_owned(frames))

    async def send(self, peer: bytes, frames: Frames) -> None:
        if not self.offer(peer, frames):
            await send_when_room(lambda: self.offer(peer, frames), self._replies(peer).room, f"caller {peer.hex()}")

    async def receive(self) -> tuple[bytes, list[Frame]]:
        return await self.inbox.take()

    def cut(self, peer: bytes) -> None:
        """This caller's connection breaks; both ends live on."""
        if peer in self._callers:
            self._callers[peer].replies.close()

    def close(self) -> None:
        self.inbox.close()
        for caller in self._callers.values():
            caller.replies.hang_up()


class InprocWire:
    """A namespace of addresses, `inproc://NAME`; two wires know nothing of each other."""

    def __init__(self, make_pipe: MakePipe = Pipe) -> None:
        self._make_pipe = make_pipe
        self._ends: dict[str, InprocListener] = {}
        self._peers = 0

    def _end(self, address: str) -> InprocListener:
        if address not in self._ends or self._ends[address].inbox.closed:
            self._ends = {name: end for name, end in self._ends.items() if not end.inbox.closed}
            self._ends[address] = InprocListener(address, self._make_pipe)
        return self._ends[address]

    def connect(self, address: str) -> InprocCaller:
        self._peers += 1
        return self._end(address).caller(self._peers.to_bytes(5, "big"))

    def listen(self, address: str) -> InprocListener:
        end = self._end(address)
        if end.bound:
            raise OSError(f"{address} is already in use")
        end.bound = True
        return end

    def sever(self, address: str) -> None:
        """What a killed process leaves: its end is gone, nobody said goodbye."""
        self._end(address).close()

    def close(self) -> None:
        for end in self._ends.values():
            end.close()
        self._ends.clear()
