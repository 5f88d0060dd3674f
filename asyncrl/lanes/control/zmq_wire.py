"""ZeroMQ on an asyncio loop: DEALER and ROUTER sockets, `ipc://` and `tcp://`.

It uses raw sockets, because zmq.asyncio drains a full queue in one go and stalls the loop meanwhile. The file
descriptor of a socket is edge-triggered, and opening, sending, receiving or reading EVENTS may consume the edge. Hence:
receive until there is nothing, read EVENTS after each send, and once a second in any case.
"""

import asyncio
import struct
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

import zmq

from asyncrl.errors import ConfigError, PeerLost
from asyncrl.lanes.control.auth import (
    ENCRYPTED,
    KEY_REFUSED,
    ZAP_DOMAIN,
    Authenticator,
    CurveKeys,
    domain_at,
    split_key,
    with_key,
)
from asyncrl.lanes.control.peer_guard import LIMITS, MOST, Connection, PeerBudget, PeerGuard, wire_bytes
from asyncrl.lanes.control.wire import (
    CALL_BYTES,
    DRAIN_BUDGET,
    HIGH_WATER,
    LIMIT_BYTES,
    ZERO_COPY_BYTES,
    Frame,
    Frames,
    Wakeup,
)

WATCHDOG_SECONDS = 1.0
MAX_FRAMES = 65_536
"""Frames of one message; ours have a few dozen. More are discarded, and the codec then finds them missing."""

RECONNECT_MILLISECONDS = 50
CONNECT_MILLISECONDS = 1000
"""Until a try to connect is given up for the next one: the kernel alone would repeat its first packet ever more rarely,
up to 16 s after an unreachable host is back. A host that is reached answers within a fraction of it."""

PIECE_BYTES = CALL_BYTES // 2
"""Length from which the frame of a call on TCP is sent in pieces, and of these: a row may be longer than a listener
takes of a stranger."""

PIECES = b"\xff" * 8
"""Begins the first frame of a message in pieces. No message has this number."""

HANDSHAKE_MILLISECONDS = 10_000
"""Time until a listener on TCP cuts off who has not finished its handshake: a caller waits as long for its welcome."""
_LOST_EVENTS = (
    zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_EVENT = struct.Struct("=hi")

RawSocket = zmq.Socket[bytes]
_Backend: Any = zmq.backend.Socket
"""The compiled class under zmq.Socket, whose methods cost a fifth of their wrappers."""

_get = _Backend.get
_send = _Backend.send
_recv = _Backend.recv
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)
_SNDMORE = int(zmq.NOBLOCK | zmq.SNDMORE)
UNREAD = PeerBudget(0, None)
"""Counts for a listener whose peers have no budgets."""
Endpoint = TypeVar("Endpoint", "ZmqCaller", "ZmqListener")


def _has_input(socket: zmq.Socket[Any]) -> bool:
    return bool(_get(socket, _EVENTS) & _POLLIN)


class _Pump:
    """Hands messages to `handle`. scheduled: whether the next pass is scheduled on the loop.

    As a context manager it stores an error from inside in `ended`, where `pump` waits.
    """

    def __init__(self, handle: Callable[[Any], None]) -> None:
        self.handle = handle
        self.scheduled = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if error is None or self.ended.done():
            return False
        self.ended.set_exception(error)
        return isinstance(error, Exception)


class _ZmqEndpoint:
    """The common part of both kinds of socket: hands messages over when the loop reports input, and notes the end."""

    def __init__(self, socket: RawSocket, address: str) -> None:
        self.address = address
        self.room = Wakeup()
        self.closed = False
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._lost_reason = ""
        self._pump: _Pump | None = None
        self._discarded = 0
        self._loop.add_reader(socket.fileno(), self._check_socket)
        self._timer = self._loop.call_later(WATCHDOG_SECONDS, self._check_regularly)

    def _check_socket(self) -> None:
        """Receives, and wakes senders in any case: POLLOUT of a ROUTER does not name the peer."""
        if self._pump is not None and not self._pump.scheduled:
            self._pump_messages()
        self.room.wake()

    def _check_regularly(self) -> None:
        self._timer = self._loop.call_later(WATCHDOG_SECONDS, self._check_regularly)
        self._check_socket()

    def _offer(self, frames: Frames) -> bool:
        if self._lost_reason:
            raise PeerLost(self._lost_reason)
        try:
            for frame in frames[:-1]:
                _send(self._socket, frame, _SNDMORE, len(frame) < ZERO_COPY_BYTES)
            _send(self._socket, frames[-1], _NOBLOCK, len(frames[-1]) < ZERO_COPY_BYTES)
        except zmq.Again:
            return False
        if _has_input(self._socket):
            self._schedule_receive()
        return True

    def _schedule_receive(self) -> None:
        """Receives soon, not now: whoever receives may be calling."""
        if self._pump is not None and not self._pump.scheduled:
            self._pump.scheduled = True
            self._loop.call_soon(self._pump_messages)

    async def pump(self, handle: Callable[[Any], None]) -> None:
        """Implements `pump` of wire.Caller."""
        self._pump = _Pump(handle)
        try:
            self._schedule_receive()
            await self._pump.ended
        finally:
            self._pump = None

    def _pump_messages(self) -> None:
        pump = self._pump
        if pump is None or pump.ended.done():
            return
        pump.scheduled = False
        with pump:
            for received in range(DRAIN_BUDGET):
                # A receive that finds nothing costs three reads of EVENTS, each of which costs as much as a message:
                # read EVENTS once after the first message, and not at all in a flood.
                if self.closed or (received == 1 and not _has_input(self._socket)):
                    self._note_empty()
                    break
                try:
                    message = self._receive()
                except zmq.Again:
                    self._note_empty()
                    break
                pump.handle(message)
            else:
                return self._schedule_receive()
            if self._lost_reason:
                raise PeerLost(self._lost_reason)

    def _receive(self) -> Any:
        """Returns the frames of a message, small ones as copies and large ones as views. Raises zmq.Again when there is
        none."""
        frames: list[Frame] = []
        more = True
        while more:
            part = _recv(self._socket, _NOBLOCK, False)
            more = part.more
            if len(frames) < MAX_FRAMES:
                frames.append(part.buffer if len(part) >= ZERO_COPY_BYTES else part.bytes)
            else:
                self._discarded += wire_bytes(len(part))
        return frames

    def _note_empty(self) -> None:
        """Takes that there is nothing to receive at the moment."""

    def _lose(self, reason: str) -> None:
        self._lost_reason = self._lost_reason or reason
        self._schedule_receive()
        self.room.wake()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
        self._lose(f"{self.address} was closed here")


class ZmqCaller(_ZmqEndpoint):
    """A DEALER. The monitor of its socket reports a broken connection at once; it does not reconnect. guard: keeps the
    budget of its peer; None: it has none."""

    def __init__(self, socket: RawSocket, address: str, guard: PeerGuard | None = None) -> None:
        super().__init__(socket, address)
        self._guard = guard
        self._reader = PeerBudget(LIMIT_BYTES, None)
        self._connection: Connection | None = None
        self._is_limited = address.startswith(ENCRYPTED)
        self._monitor: Any = socket.get_monitor_socket(_LOST_EVENTS | zmq.Event.CONNECTED)
        self._monitor.linger = 0
        self._loop.add_reader(self._monitor.fileno(), self._read_monitor)
        try:
            socket.ipv6 = "[" in address
            socket.connect(split_key(address)[0])
        except zmq.ZMQError as error:
            self.close()
            raise PeerLost(f"{address!r:.100} is no address that can be connected to: {error}") from error
        self._read_monitor()

    def _read_monitor(self) -> None:
        while _has_input(self._monitor):
            event, value = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            if event == zmq.Event.CONNECTED:
                if self._guard is not None:
                    self._connection = self._guard.connection(value, self._reader)
            elif event == zmq.Event.DISCONNECTED:
                self._lose(f"the connection to {self.address} broke")
            elif event & _LOST_EVENTS:  # Only a refusal that came as one tells that its listener lives.
                is_sure = event == zmq.Event.HANDSHAKE_FAILED_AUTH
                self._lose(f"{self.address} {KEY_REFUSED}{'' if is_sure else ', or has just ended'}")

    def _receive(self) -> list[Frame]:
        frames = super()._receive()
        if self._connection is not None:
            self._connection.take(frames, self._discarded)
            self._discarded = 0
        return cast(list[Frame], frames)

    def _note_empty(self) -> None:
        self._reader.emptied += 1

    def offer(self, frames: Frames) -> bool:
        return self._offer(in_pieces(frames) if self._is_limited and max(map(len, frames)) > PIECE_BYTES else frames)

    def close(self) -> None:
        if not self.closed:
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            if self._guard is not None and self._connection is not None:
                self._guard.forget(self._connection.fd)
        super().close()


class ZmqListener(_ZmqEndpoint):
    """A ROUTER that raises when a peer is gone, and waits when it does not read, instead of dropping messages.

    is_admitted: whether the peer with a user id may still send; None: all may. Messages of others are refused, which
    counts: ZeroMQ closes no connection of a single peer. guard: keeps the budgets of peers; None: they have none.
    """

    is_admitted: Callable[[str], bool] | None = None
    refused_messages = 0
    limit_bytes = LIMIT_BYTES

    def __init__(
        self, socket: RawSocket, address: str, guard: PeerGuard | None = None, reader: PeerBudget = UNREAD
    ) -> None:
        super().__init__(socket, address)
        self._guard = guard
        self._reader = reader
        self._connections: dict[bytes, Connection] = {}
        self._prune_at = 64

    def offer(self, peer: bytes, frames: Frames) -> bool:
        try:
            return self._offer([peer, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerLost(f"caller {peer.hex()} of {self.address} is gone") from error

    def _receive(self) -> tuple[bytes, list[Frame]]:
        """Returns the sender, which ROUTER puts into the first frame, and the other frames."""
        if self.is_admitted is None and self._guard is None:
            return _recv(self._socket, _NOBLOCK), joined(super()._receive(), self.limit_bytes)
        while True:
            sender = _recv(self._socket, _NOBLOCK, False)
            frames = super()._receive()
            peer = cast(bytes, sender.bytes)
            if self._guard is not None:
                self._count(self._guard, peer, sender, frames)
            if self.is_admitted is None or self.is_admitted(_user_of(sender)):
                return peer, joined(frames, self.limit_bytes)
            self.refused_messages += 1

    def _note_empty(self) -> None:
        self._reader.emptied += 1

    def _count(self, guard: PeerGuard, peer: bytes, sender: zmq.Frame, frames: list[Frame]) -> None:
        """Counts what a peer sent to its connection."""
        connection = self._connections.get(peer)
        if connection is None:
            connection = guard.connection(int(cast(str, sender.get("__fd"))), self._reader)
            if connection is None:
                return
            guard.said_something(connection)
            self._connections[peer] = connection
            if len(self._connections) >= self._prune_at:
                self._connections = {name: each for name, each in self._connections.items() if guard.holds(each)}
                self._prune_at = 64 + 2 * len(self._connections)
        connection.take(frames, self._discarded)
        self._discarded = 0


def in_pieces(frames: Frames) -> list[Frame]:
    """Returns frames of which none is longer than a listener on TCP takes: first how many pieces each frame has."""
    counts = []
    pieces = list[Frame]()
    for frame in frames:
        view = memoryview(frame)
        starts = range(0, max(1, len(view)), PIECE_BYTES)
        pieces += [view[start : start + PIECE_BYTES] for start in starts]
        counts.append(len(starts))
    return [PIECES + struct.pack(f"<{len(counts)}I", *counts), *pieces]


def joined(frames: list[Frame], limit_bytes: int) -> list[Frame]:
    """Returns the frames of a message that came in pieces; any other message, and one that is longer or is not what
    `in_pieces` makes, as it came: it decodes to nothing."""
    if not frames or bytes(frames[0][: len(PIECES)]) != PIECES:
        return frames
    head = bytes(frames[0][len(PIECES) :])
    pieces = iter(frames[1:])
    if len(head) % 4 or sum(map(len, frames)) > limit_bytes:
        return frames
    counts = struct.unpack(f"<{len(head) // 4}I", head)
    if not counts or sum(counts) != len(frames) - 1:
        return frames
    return [b"".join(islice(pieces, count)) for count in counts]


def _user_of(frame: zmq.Frame) -> str:
    """Returns the user id that authentication gave to the sender of a frame, "" for none."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class ZmqWire:
    """One ZeroMQ context for the whole process, made and closed on the loop that uses its sockets.

    keys: the run's, which both sides must hold. `tcp://` needs them; without them an `ipc://` socket accepts every
    process that may open it. limit_bytes: of a message that comes; a peer with a larger one is cut off before it is
    received.
    """

    def __init__(self, keys: CurveKeys | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        self._context: zmq.Context[RawSocket] = zmq.Context()
        # A caller takes three sockets; the default of 1023 would end a fleet of 170 workers.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._keys = keys
        self._limit_bytes = limit_bytes
        self._authenticator: Authenticator | None = None
        self._guard: PeerGuard | None = None
        self._endpoints: list[ZmqCaller | ZmqListener] = []
        self._domains: dict[ZmqListener, bytes] = {}

    def connect(self, address: str) -> ZmqCaller:
        keys = self._keys_for(address)
        split_key(address)  # One that names no key is refused before there is a socket.
        socket = self._socket(zmq.DEALER)
        if keys is not None:
            keys.set_up_caller(socket, address)
        return self._register(ZmqCaller(socket, address, self._guard_of(address)))

    def listen(self, address: str) -> ZmqListener:
        """Returns a listener. For `tcp://127.0.0.1:*` the system chooses the port, which its `address` names."""
        keys = self._keys_for(address)
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys is not None:
            self._authenticator = self._authenticator or Authenticator(self._context, keys)
            keys.set_up_listener(socket, address)
        limit = min(self._limit_bytes, CALL_BYTES)
        reader = PeerBudget(LIMITS * limit, MOST * limit)
        if address.startswith(ENCRYPTED):
            socket.maxmsgsize = limit
            socket.handshake_ivl = HANDSHAKE_MILLISECONDS
        if (guard := self._guard_of(address)) is not None:
            guard.watch(socket, reader)
        try:
            socket.ipv6 = "[" in address
            socket.bind(address)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if keys is not None and keys.in_addresses and address.startswith(ENCRYPTED):
            bound = with_key(bound, keys.public)
        listener = self._register(ZmqListener(socket, bound, guard, reader))
        listener.limit_bytes = self._limit_bytes
        if keys is not None:
            self._domains = {other: domain for other, domain in self._domains.items() if not other.closed}
            self._domains[listener] = keys.domain_of(address)
            self._refuse_former_callers()
        return listener

    def admit(self, callers: Iterable[str], address: str = "") -> None:
        """Replaces the public keys that may call: at an address as `listen` takes it, or wherever no others are named.
        Whoever is connected with another key is refused from now on."""
        assert self._authenticator is not None, "`listen` comes first"
        self._authenticator.admit(domain_at(address) if address else ZAP_DOMAIN, callers)
        self._refuse_former_callers()

    def _refuse_former_callers(self) -> None:
        """Has those listeners look at who sends a message that may have callers which are admitted no more."""
        assert self._authenticator is not None, "there are listeners with keys"
        for listener, domain in self._domains.items():
            if domain in self._authenticator.narrowed:
                listener.is_admitted = partial(self._authenticator.admits, domain)

    def _socket(self, kind: int) -> RawSocket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = HIGH_WATER
        socket.maxmsgsize = self._limit_bytes
        socket.reconnect_ivl = RECONNECT_MILLISECONDS
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
        socket.copy_threshold = ZERO_COPY_BYTES
        return socket

    def _guard_of(self, address: str) -> PeerGuard | None:
        """Returns what keeps the budgets of peers on TCP, which needs a clock and counters of Linux."""
        if not address.startswith(ENCRYPTED) or sys.platform != "linux":
            return None
        self._guard = self._guard or PeerGuard()
        return self._guard

    def _keys_for(self, address: str) -> CurveKeys | None:
        if self._keys is None and address.startswith(ENCRYPTED):
            raise ConfigError(f"{address} needs CURVE keys: every TCP socket is encrypted; ipc:// needs none")
        return self._keys

    def _register(self, endpoint: Endpoint) -> Endpoint:
        self._endpoints = [other for other in self._endpoints if not other.closed]
        self._endpoints.append(endpoint)
        return endpoint

    def close(self) -> None:
        """Closes the sockets and then the context, which waits for its sockets."""
        for endpoint in self._endpoints:
            endpoint.close()
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._authenticator is not None:
            self._authenticator.close()
            self._authenticator = None
        self._context.destroy(linger=0)
