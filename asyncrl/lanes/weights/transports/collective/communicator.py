"""A pair of ranks that move parts of the weights, and the thread that owns its communicator: the trainer is rank 0, a
receiver is rank 1."""

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from torch import Tensor

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
