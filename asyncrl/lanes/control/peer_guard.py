"""Budgets of TCP peers, kept by a thread of its own, because ZeroMQ has none of them and a busy loop would be too late.

    accepted, nothing taken yet     a stranger: so many of one address and of all; one more costs the oldest its place
    descriptor close to the limit   cut off at once: what is left belongs to the ledger
    bytes that came, not taken      an unfinished message, of which ZeroMQ bounds each frame alone: cut off over a limit

A connection is cut off by `shutdown` of its descriptor, which ZeroMQ then closes; the peer sees that it broke. The
kernel counts the bytes that came, and whoever takes a message those of its frames on the wire.
"""

import ctypes
import os
import resource
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq

from asyncrl.lanes.control.wire import Frame

LIMITS = 4
MOST = 16
"""Times the largest frame of a listener that its peers may have sent beyond what was taken."""
PERIOD = 0.25
"""Seconds between two looks at the bytes of all connections: over a loopback some 50 MB come meanwhile."""
SLACK = 8 << 20
"""Bytes that the kernel may hold for a peer that ZeroMQ does not read at the moment, and those of a handshake."""
MOST_STRANGERS = 4096
"""Connections that have said nothing yet, where descriptors suffice: each takes some kilobytes."""
SHARE = 8
"""Part of all descriptors that strangers may have, and half as many those of one address."""
RESERVE = 4
"""Part of all descriptors that no connection takes: journal, shared memory, children and workers need them."""
FRAME_BYTES = 33
"""Bytes that CURVE adds to a frame, before those of its length (ZMTP 3.1)."""
TCP_INFO = 11
RECEIVED = struct.Struct("128xQ")
"""Option of a socket, and in it the bytes that came from the peer (linux/tcp.h)."""
_EVENTS = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.MONITOR_STOPPED
_EVENT = struct.Struct("=hi")
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(eq=False, slots=True)
class PeerBudget:
    """The budget of each peer of a socket. limit: bytes that a peer may have sent beyond the messages that were taken,
    when all there was has been. most: the same while messages wait, which a busy process takes late; None: any number,
    of the one peer of a caller. emptied: how often all there was had been taken."""

    limit: int
    most: int | None
    emptied: int = 0


class Connection:
    """One TCP connection. inode: of its socket, because descriptors are used again. taken: bytes on the wire of the
    messages that were taken."""

    __slots__ = ("address", "fd", "inode", "looked", "reader", "taken")

    def __init__(self, fd: int, inode: int, reader: PeerBudget) -> None:
        self.fd = fd
        self.inode = inode
        self.reader = reader
        self.taken = 0
        self.looked = -1
        self.address = _address(fd)

    def take(self, frames: list[Frame], beside: int = 0) -> None:
        """Counts a message that was taken. beside: bytes on the wire of its frames that were discarded."""
        self.taken += beside + sum(map(wire_bytes, map(len, frames)))

    def is_over(self) -> bool:
        """Returns whether more came than its reader allows: of one message that has not ended, if all others were taken
        since the last look."""
        reader = self.reader
        before = self.looked
        self.looked = -1
        untaken = bytes_received(self.fd) - self.taken - SLACK
        if untaken <= reader.limit:
            return False
        self.looked = reader.emptied
        return 0 <= before < reader.emptied or (reader.most is not None and untaken > reader.most)


class PeerGuard:
    """Holds the connections of a process on TCP. cut: how many it has cut off, by why."""

    def __init__(self) -> None:
        self.cut: Counter[str] = Counter()
        self._connections: dict[int, Connection] = {}
        self._strangers: dict[int, Connection] = {}
        self._monitors: dict[Any, PeerBudget] = {}
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._spare = os.open(os.devnull, os.O_RDONLY)  # Makes room for the copy of one that is cut off.
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def watch(self, listener: "zmq.Socket[bytes]", reader: PeerBudget) -> None:
        """Watches who connects to a socket that is not bound yet."""
        monitor = listener.get_monitor_socket(_EVENTS)
        monitor.linger = 0
        with self._lock:
            self._monitors[monitor] = reader
        os.eventfd_write(self._wake, 1)

    def connection(self, fd: int, reader: PeerBudget) -> Connection | None:
        """Returns the connection of a descriptor; None for one that is closed."""
        with self._lock, suppress(OSError):
            inode = os.fstat(fd).st_ino
            known = self._connections.get(fd)
            if known is None or known.inode != inode:
                known = self._connections[fd] = Connection(fd, inode, reader)
            return known
        return None

    def holds(self, connection: Connection) -> bool:
        """Returns whether a connection is one still."""
        return self._connections.get(connection.fd) is connection

    def said_something(self, connection: Connection) -> None:
        """Notes that a peer is no stranger any more: its message was taken."""
        with self._lock:
            self._strangers.pop(connection.fd, None)

    def close(self) -> None:
        """Ends the thread and closes its monitors."""
        self._ended = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for fd in (self._wake, self._spare):
            with suppress(OSError):
                os.close(fd)

    def _watch(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        watched: set[Any] = set()
        looked = time.monotonic()
        while not self._ended:
            ready = dict(poller.poll(round(PERIOD * 1000)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                with self._lock:
                    found = {*self._monitors} - watched
                for monitor in found:
                    poller.register(monitor, zmq.POLLIN)
                watched |= found
            for monitor in watched & ready.keys():
                if not self._read(monitor, self._monitors[monitor]):
                    poller.unregister(monitor)
                    watched.discard(monitor)
            if time.monotonic() - looked >= PERIOD:
                looked = time.monotonic()
                self._look()
        for monitor in watched:
            monitor.close()

    def _read(self, monitor: Any, reader: PeerBudget) -> bool:
        """Takes the events of a listener; returns False once it was closed."""
        with suppress(zmq.Again):
            while True:
                event, fd = _EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
                if event == zmq.Event.ACCEPTED:
                    self._accepted(fd, reader)
                elif event == zmq.Event.DISCONNECTED:
                    self.forget(fd)
                elif event == zmq.Event.MONITOR_STOPPED:
                    monitor.close()
                    self._monitors.pop(monitor, None)
                    return False
        return True

    def _accepted(self, fd: int, reader: PeerBudget) -> None:
        came = self.connection(fd, reader)
        if came is None:
            return
        most = _most_descriptors()
        if fd >= most - most // RESERVE:
            return self._cut(came, "no descriptors are left for more connections")
        with self._lock:
            if not came.taken:
                self._strangers[fd] = came
            allowed = min(most // SHARE, MOST_STRANGERS)
            same = [each for each in self._strangers.values() if each.address == came.address]
            oldest = next(iter(self._strangers.values())) if len(self._strangers) > allowed else None
        if len(same) > allowed // 2:
            self._cut(same[0], "too many connections of one address said nothing")
        elif oldest is not None:
            self._cut(oldest, "too many connections said nothing")

    def _look(self) -> None:
        with self._lock:
            found = [*self._connections.values()]
        for each in found:
            if each.is_over():
                self._cut(each, "a message had no end")

    def forget(self, fd: int) -> None:
        with self._lock:
            self._connections.pop(fd, None)
            self._strangers.pop(fd, None)

    def _cut(self, connection: Connection, why: str) -> None:
        """Ends a connection, unless its descriptor is another one's by now, which a copy of it tells for sure."""
        self.forget(connection.fd)
        if (copy := self._copied(connection.fd)) < 0:
            return
        if os.fstat(copy).st_ino == connection.inode:
            with socket.socket(fileno=copy) as peer, suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
                self.cut[why] += 1
        else:
            os.close(copy)
        if self._spare < 0:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def _copied(self, fd: int) -> int:
        """Returns a copy of a descriptor, for which the spare one makes room; -1 where it is closed."""
        with suppress(OSError):
            return os.dup(fd)
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
            with suppress(OSError):
                return os.dup(fd)
        return -1


def wire_bytes(size: int) -> int:
    """Returns the bytes on the wire of a frame of so many bytes."""
    return size + FRAME_BYTES + (2 if size + FRAME_BYTES < 256 else 9)


def _most_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def bytes_received(fd: int) -> int:
    """Returns the bytes that came over a TCP connection; 0 for what is none, or is closed by now."""
    info = ctypes.create_string_buffer(RECEIVED.size)
    size = ctypes.c_uint(RECEIVED.size)
    failed = _LIBC.getsockopt(fd, socket.IPPROTO_TCP, TCP_INFO, info, ctypes.byref(size))
    return 0 if failed or size.value < RECEIVED.size else int(RECEIVED.unpack(info)[0])


def _address(fd: int) -> str:
    """Returns the host of the peer; "" where it is gone. The descriptor may be anything by then: a local socket, whose
    name is one text, or no socket at all."""
    copy = -1
    try:
        copy = os.dup(fd)
        with socket.socket(fileno=copy) as peer:
            copy = -1
            name = peer.getpeername()
    except OSError:
        name = ""
    if copy >= 0:
        os.close(copy)
    return str(name[0]) if isinstance(name, tuple) else ""
