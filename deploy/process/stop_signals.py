"""Ctrl-C, SIGTERM and the end of a terminal (SIGHUP) while a run goes on: the first one ends it in order, the second
one does not wait for workers."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self
from weakref import WeakKeyDictionary

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO = 1.0
"""Seconds in which another signal than Ctrl-C repeats the one before it: `timeout`, service managers and job
schedulers send it to a process and to its whole group. As long after the end of an interrupted run, Ctrl-C does too."""
_RECEIVERS: "WeakKeyDictionary[asyncio.Task[Any], StopSignals]" = WeakKeyDictionary()
STOPPING = "stopping: workers get up to ten seconds to end; Ctrl-C once more does not wait for them"


class StopSignals:
    """Handles the signals while it is entered; only the main thread can. It is made in the task that it cancels.

    say: gets one line at the first signal, unless the run ends in order. hurry: called at the second signal, to kill
    workers that are being stopped. abandoned: why the task was cancelled, "" when it was not.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        work = asyncio.current_task()
        assert work is not None
        self._work = work
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._end_in_order: Callable[[], None] | None = None
        self._first_at: float | None = None
        self._ends_in_order = False
        self.hurry: Callable[[], None] | None = None
        self.abandoned = ""

    def __enter__(self) -> Self:
        _RECEIVERS[self._work] = self
        with suppress(ValueError, RuntimeError):  # This is not the main thread.
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP, and shall.
                    self._loop.add_signal_handler(number, self.receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        del _RECEIVERS[self._work]
        handled = [number for number in SIGNALS if self._loop.remove_signal_handler(number)]
        if self._first_at is not None:
            for number in handled:
                _ignore_echoes(number)

    @property
    def is_ending(self) -> bool:
        """Returns whether the work was told to end."""
        return self._ends_in_order or self._first_at is not None

    @contextmanager
    def ending_in_order(self, end: Callable[[], None]) -> Iterator[None]:
        """Lets the first signal inside the block call `end` instead of abandoning the work."""
        self._end_in_order = end
        try:
            yield
        finally:
            self._end_in_order = None

    def end_in_order(self) -> bool:
        """Ends the work as a first signal does, where that ends in order; returns whether it does. The next signal is
        still the first one, which then changes nothing."""
        if self._end_in_order is None:
            return False
        self._ends_in_order = True
        self._end_in_order()
        return True

    def receive(self, number: signal.Signals) -> None:
        """Acts on a signal; runs on the loop of the work."""
        if self._first_at is None:
            self._first_at = self._loop.time()
            if self._ends_in_order:
                return
            if self._end_in_order is not None:
                self._end_in_order()
            else:
                self._say(STOPPING)
                self.abandon("interrupted")
        elif number == signal.SIGINT or self._loop.time() - self._first_at >= ECHO:
            if self.hurry is not None:
                self.hurry()
            self.abandon("interrupted a second time")

    def abandon(self, why: str) -> None:
        """Cancels the work once; its cleanup then stops the workers, which is bounded."""
        if not self.abandoned:
            self.abandoned = why
            self._work.cancel()


def _ignore_echoes(number: signal.Signals) -> None:
    """Ignores a signal for ECHO seconds, in which an interrupted run prints how to go on; a later one acts as before
    the run."""
    end = time.monotonic() + ECHO
    before = signal.getsignal(number)

    def act(received: int, _: object) -> None:
        if time.monotonic() >= end:
            signal.signal(number, before)
            signal.raise_signal(received)

    signal.signal(number, act)


def interrupt(work: "asyncio.Task[Any]") -> None:
    """Does to a task what Ctrl-C does where signals reach it; cancels it where it handles none. Runs on its loop."""
    if (receiver := _RECEIVERS.get(work)) is not None:
        receiver.receive(signal.SIGINT)
    else:
        work.cancel()
