"""One thread that owns one communicator: NCCL and gloo calls block, and must not come from several threads."""

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

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
