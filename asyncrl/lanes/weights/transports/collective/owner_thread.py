"""One thread that owns one communicator: NCCL and gloo calls block, and must not come from several threads."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class OwnerThread:
    """Runs work in turn until it is closed. The thread is a daemon: a library that hangs in a call keeps no process
    from ending. Its queue is bounded by the callers, which wait for one piece of work before they submit the next."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        """Ends the thread after what was submitted before."""
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
