"""A pair of ranks that move parts of the weights, the thread that owns its communicator, and gloo, the CPUs' backend.

The trainer is rank 0, a receiver is rank 1; nccl.py has the backend for GPUs.
"""

import atexit
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from asyncrl.errors import DeadlineExceeded, PeerLost
from asyncrl.lanes.bound_socket import bound_socket

TRAINER = 0
RECEIVER = 1
"""Ranks of a pair."""

GROUP_PARTS = 4
"""Parts that are posted at once: while one is copied, others travel."""


CONNECT_SECONDS = 5.0
"""Seconds in which both ends of a pair must meet: the control wire has just told both."""


class Communicator(Protocol):
    """One end of a pair. Every method but `abort` is called on the thread that connected it."""

    def send(self, parts: Sequence[Tensor], seconds: float) -> None:
        """Sends one-dimensional tensors of bytes as a group; afterwards their memory may change.

        Raises:
            DeadlineExceeded: they were not sent within `seconds`.
            PeerLost: the other end is gone, or the pair was aborted.
        """

    def receive(self, parts: Sequence[Tensor], seconds: float) -> None:
        """Fills tensors with a group that has the same sizes. Raises what `send` raises."""

    def abort(self) -> None:
        """Asks what is under way to end with PeerLost. Returns at once, and may be called on any thread, repeatedly.
        A backend that cannot interrupt a transfer ends it by its deadline."""

    def close(self) -> None:
        """Frees the pair, so that the other end notices. May be called repeatedly."""


class Backend(Protocol):
    """Makes pairs. device: where the memory of parts is. part_bytes: bytes of a part at most."""

    device: str
    part_bytes: int

    def invite(self) -> str:
        """Returns the place, as text, at which the two ends of one new pair meet. Called by the trainer."""

    def connect(self, meeting: str, rank: int, seconds: float) -> Communicator:
        """Connects one end, on the thread that will use it. Raises DeadlineExceeded when the other end does not come
        within `seconds`, and PeerLost when the meeting is gone."""

    def close(self) -> None:
        """Ends further meetings; pairs that are connected stay."""


# One thread that owns one communicator: NCCL and gloo calls block, and must not come from several threads.


T = TypeVar("T")

END_SECONDS = 1.0
"""Seconds that the end of the process waits for threads that were closed and free what they own."""

_closed: WeakSet[threading.Thread] = WeakSet()
"""Threads that were closed; one that has ended goes by itself."""


class OwnerThread:
    """Runs work in turn until it is closed. Its queue is bounded by the callers, which wait for one piece of work
    before they submit the next.

    The thread is a daemon: a library that hangs in a call keeps no process from ending. One that was closed has
    END_SECONDS at the end of the process. Python ends a daemon thread wherever it is, and in the middle of freeing a
    communicator of gloo that would abort the process.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        """Ends the thread after what was submitted before."""
        _closed.add(self._thread)
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # A failure of any kind is the answer of the work.
                future.set_exception(error)


@atexit.register
def _await_closed() -> None:
    until = time.monotonic() + END_SECONDS
    for thread in list(_closed):
        thread.join(max(until - time.monotonic(), 0.0))


# Pairs over gloo: the same path as NCCL's, on CPUs. Nothing is encrypted, so it is for one host or a trusted network.
#
# Both ends meet at a TCP store of the trainer under a name that the encrypted control wire has told them.


LEAST_WAIT = 0.001
"""Seconds: gloo takes a wait of 0 s for one without an end."""

PART_BYTES = 2 << 20


gloo: Any = ProcessGroupGloo
"""Its stubs lack most of what it has."""


class GlooBackend:
    """Implements Backend. host: address of this end, at which others reach it."""

    device = "cpu"
    part_bytes = PART_BYTES

    def __init__(self, host: str) -> None:
        self._host = host
        self._store: TCPStore | None = None
        self._port = 0

    def invite(self) -> str:
        if self._store is None:
            self._store = self._listen()
        return f"{self._host}:{self._port}/{secrets.token_hex(16)}"

    def connect(self, meeting: str, rank: int, seconds: float) -> "GlooPair":
        place, _, name = meeting.partition("/")
        host, _, port = place.rpartition(":")
        wait = timedelta(seconds=max(seconds, LEAST_WAIT))
        try:
            store = TCPStore(host, int(port), None, False, wait, wait_for_workers=False)
            options = gloo._Options()
            options._timeout = wait
            options._devices = [gloo.create_device(hostname=self._host)]
            group = gloo(PrefixStore(name, store), rank, 2, options)
        except RuntimeError as error:
            raise _explained(error, f"rank {1 - rank} of the pair at {place} did not come", seconds) from error
        return GlooPair(group, 1 - rank)

    def close(self) -> None:
        self._store = None

    def _listen(self) -> TCPStore:
        listener = bound_socket(self._host, 0, "weights.transport")
        listener.listen(socket.SOMAXCONN)
        self._port = listener.getsockname()[1]
        # Given only a name, the store would listen on every interface. It closes the socket itself.
        return TCPStore(self._host, self._port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


class GlooPair:
    """Implements Communicator. gloo cannot interrupt a wait: after `abort` it ends by its deadline, or when the other
    end closes."""

    def __init__(self, group: Any, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._aborted = False

    def send(self, parts: Sequence[Tensor], seconds: float) -> None:
        group = self._open()
        self._move(lambda part: group.send([part], self._peer, 0), parts, seconds)

    def receive(self, parts: Sequence[Tensor], seconds: float) -> None:
        group = self._open()
        self._move(lambda part: group.recv([part], self._peer, 0), parts, seconds)

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._group = None

    def _open(self) -> Any:
        if self._aborted or self._group is None:
            raise PeerLost(f"the pair with rank {self._peer} was aborted")
        return self._group

    def _move(self, post: Callable[[Tensor], Any], parts: Sequence[Tensor], seconds: float) -> None:
        """Posts all parts, then waits for each. Of a peer that has gone before, gloo tells when a part is posted."""
        until = time.monotonic() + seconds
        try:
            for work in [post(part) for part in parts]:
                work.wait(timedelta(seconds=max(until - time.monotonic(), LEAST_WAIT)))
        except RuntimeError as error:
            raise _explained(error, f"rank {self._peer} moved no weights", seconds) from error


def _explained(error: RuntimeError, what: str, seconds: float) -> DeadlineExceeded | PeerLost:
    """Returns our error for one of gloo, which tells a late peer from one that is gone only in its text."""
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return DeadlineExceeded(f"{what} within {seconds:.1f} s ({text:.120})")
    return PeerLost(f"{what}: it is gone ({text:.120})")
