"""ZeroMQ on an asyncio loop: DEALER and ROUTER sockets, `ipc://` and `tcp://`.

Raw sockets, not zmq.asyncio, which drains a full queue in one go and stalls the loop for as long as that takes. The
file descriptor of a socket is edge-triggered, and making, sending, receiving or a look at EVENTS may consume the edge.
Hence: receive until there is nothing, look at EVENTS after each send, and look once a second anyhow.
"""

import asyncio
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import zmq

from asyncrl.errors import ConfigError, PeerLost
from asyncrl.wire.auth import CurveKeys, Gatekeeper
from asyncrl.wire.ends import (
    DRAIN_BUDGET,
    HIGH_WATER,
    LIMIT_BYTES,
    ZERO_COPY_BYTES,
    Frame,
    Frames,
    Signal,
    Turn,
    send_when_room,
)

WATCHDOG_SECONDS = 1.0
MAX_FRAMES = 65_536
"""Frames of one message; ours have a few dozen. The rest is let go, and the codec then misses it."""

RECONNECT_MILLISECONDS = 50
ENCRYPTED = "tcp://"
_LOST_EVENTS = (
    zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_EVENT = struct.Struct("=hi")

RawSocket = zmq.Socket[bytes]
_Backend: Any = zmq.backend.Socket
"""The compiled class under zmq.Socket: its methods cost a fifth of those that wrap them."""

_get, _send, _recv = _Backend.get, _Backend.send, _Backend.recv
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
MadeEnd = TypeVar("MadeEnd", "ZmqCaller", "ZmqListener")


def _has_input(socket: zmq.Socket[Any]) -> bool:
    return bool(_get(socket, _EVENTS) & _POLLIN)


class _Pouring:
    """Who is given the messages. due: it is called soon. As a context: what fails inside is raised where it waits."""

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.take, self.due = take, False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if error is None or self.ended.done():
            return False
        self.ended.set_exception(error)
        return isinstance(error, Exception)


class _End:
    """What both kinds of socket share: waiting for the loop to say that something may be read or written."""

    def __init__(self, socket: RawSocket, address: str) -> None:
        self.address = address
        self._socket, self._loop = socket, asyncio.get_running_loop()
        self._readable, self._writable, self._turn = Signal(), Signal(), Turn()
        self._ended = ""
        self._closed = False
        self._pouring: _Pouring | None = None
        self._loop.add_reader(socket.fileno(), self._look)
        self._watch = self._loop.call_later(WATCHDOG_SECONDS, self._look_again)

    def _look(self) -> None:
        """Wake whom it may concern. Room is told on every look: a ROUTER's POLLOUT does not say which peer has it."""
        if self._pouring is not None:
            if not self._pouring.due:  # else it comes in this very turn of the loop, or has had its share of it
                self._pour()
        elif _has_input(self._socket):
            self._readable.wake()
        self._writable.wake()

    def _look_again(self) -> None:
        self._watch = self._loop.call_later(WATCHDOG_SECONDS, self._look_again)
        self._look()

    def _offer(self, frames: Frames) -> bool:
        if self._ended:
            raise PeerLost(self._ended)
        try:
            for frame in frames[:-1]:
                _send(self._socket, frame, _SNDMORE, len(frame) < ZERO_COPY_BYTES)
            _send(self._socket, frames[-1], _NOBLOCK, len(frames[-1]) < ZERO_COPY_BYTES)
        except zmq.Again:
            return False
        if _has_input(self._socket):
            self._call_in()
        return True

    def _call_in(self) -> None:
        """There is something to receive; whoever does so may be our caller."""
        if self._pouring is None:
            self._readable.wake()
        elif not self._pouring.due:
            self._pouring.due = True
            self._loop.call_soon(self._pour)

    async def pour(self, take: Callable[[Any], None]) -> None:
        """See Pouring. A flood lets other tasks run every DRAIN_BUDGET messages."""
        self._pouring = _Pouring(take)
        try:
            self._call_in()
            await self._pouring.ended
        finally:
            self._pouring = None

    def _pour(self) -> None:
        pouring = self._pouring
        if pouring is None or pouring.ended.done():
            return
        pouring.due = False
        with pouring:
            for taken in range(DRAIN_BUDGET):
                # To be told that there is nothing costs as much as three looks at EVENTS, each as much as a message:
                # one look where a single message is likely, none in a flood.
                if self._closed or (taken == 1 and not _has_input(self._socket)):
                    break
                try:
                    message = self._message()
                except zmq.Again:
                    break
                pouring.take(message)
            else:
                return self._call_in()
            if self._ended:
                raise PeerLost(self._ended)

    def _message(self) -> Any:
        """What `receive` returns."""
        return self._take()

    async def _receive(self) -> Any:
        await self._turn.next()
        while True:
            if self._closed:
                raise PeerLost(self._ended)
            if _has_input(self._socket):
                return self._message()
            if self._ended:
                raise PeerLost(self._ended)
            self._turn.rest()
            await self._readable.wait()

    def _take(self) -> list[Frame]:
        """Small frames copied, large ones as views. Raises zmq.Again when there is none."""
        frames: list[Frame] = []
        more = True
        while more:
            part = _recv(self._socket, _NOBLOCK, False)
            more = part.more
            if len(frames) < MAX_FRAMES:
                frames.append(part.buffer if len(part) >= ZERO_COPY_BYTES else part.bytes)
        return frames

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._call_in()
        self._writable.wake()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._watch.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
        self._end(f"{self.address} was closed here")


class ZmqCaller(_End):
    """A DEALER. The socket's monitor tells at once when the connection breaks; there is no second one."""

    def __init__(self, socket: RawSocket, address: str) -> None:
        super().__init__(socket, address)
        self._monitor: Any = socket.get_monitor_socket(_LOST_EVENTS)
        self._monitor.linger = 0
        self._loop.add_reader(self._monitor.fileno(), self._observe)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise
        self._observe()

    def _observe(self) -> None:
        while _has_input(self._monitor):
            (event, _) = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            if event == zmq.Event.DISCONNECTED:
                self._end(f"the connection to {self.address} broke")
            elif event & _LOST_EVENTS:
                self._end(f"{self.address} does not accept our keys")

    def offer(self, frames: Frames) -> bool:
        return self._offer(frames)

    async def send(self, frames: Frames) -> None:
        if not self._offer(frames):
            await send_when_room(partial(self._offer, frames), self._writable, self.address)

    async def receive(self) -> list[Frame]:
        frames: list[Frame] = await self._receive()
        return frames

    def close(self) -> None:
        if not self._closed:
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        super().close()


class ZmqListener(_End):
    """A ROUTER that says when a peer is gone or does not read, instead of dropping messages."""

    def offer(self, peer: bytes, frames: Frames) -> bool:
        try:
            return self._offer([peer, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerLost(f"caller {peer.hex()} of {self.address} is gone") from error

    async def send(self, peer: bytes, frames: Frames) -> None:
        if not self.offer(peer, frames):
            await send_when_room(partial(self.offer, peer, frames), self._writable, f"caller {peer.hex()}")

    async def receive(self) -> tuple[bytes, list[Frame]]:
        message: tuple[bytes, list[Frame]] = await self._receive()
        return message

    def _message(self) -> tuple[bytes, list[Frame]]:
        """The first frame, never the last, is who sent the others: ROUTER puts it there."""
        return _recv(self._socket, _NOBLOCK), self._take()


class ZmqWire:
    """One ZeroMQ context, for the whole process; made and closed on the loop that uses its sockets.

    keys: of the run; both sides must hold the same ones. Needed for `tcp://`; `ipc://` sockets without them answer
    everybody who may open them.
    """

    def __init__(self, keys: CurveKeys | None = None) -> None:
        self._context: zmq.Context[RawSocket] = zmq.Context()
        self._keys = keys
        self._gatekeeper: Gatekeeper | None = None
        self._ends: list[ZmqCaller | ZmqListener] = []

    @property
    def open_ends(self) -> int:
        return sum(not end._closed for end in self._ends)

    def connect(self, address: str) -> ZmqCaller:
        keys = self._keys_for(address)
        socket = self._socket(zmq.DEALER)
        if keys is not None and address.startswith(ENCRYPTED):
            keys.apply_to_client(socket)
        elif keys is not None:
            keys.show_password(socket)
        return self._kept(ZmqCaller(socket, address))

    def listen(self, address: str) -> ZmqListener:
        """For `tcp://127.0.0.1:*` the system chooses the port; the listener's `address` names it."""
        keys = self._keys_for(address)
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys is not None:
            self._gatekeeper = self._gatekeeper or Gatekeeper(self._context, keys)
            (keys.apply_to_server if address.startswith(ENCRYPTED) else keys.ask_password)(socket)
        try:
            socket.bind(address)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return self._kept(ZmqListener(socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)))

    def _socket(self, kind: int) -> RawSocket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = HIGH_WATER
        socket.maxmsgsize = LIMIT_BYTES
        socket.reconnect_ivl = RECONNECT_MILLISECONDS
        socket.copy_threshold = ZERO_COPY_BYTES
        return socket

    def _keys_for(self, address: str) -> CurveKeys | None:
        if self._keys is None and address.startswith(ENCRYPTED):
            raise ConfigError(f"{address} needs CURVE keys: every TCP socket is encrypted; ipc:// needs none")
        return self._keys

    def _kept(self, end: MadeEnd) -> MadeEnd:
        self._ends = [other for other in self._ends if not other._closed]
        self._ends.append(end)
        return end

    def close(self) -> None:
        """Sockets first: a context waits for them for ever."""
        for end in self._ends:
            end.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
            self._gatekeeper = None
        self._context.destroy(linger=0)
