"""Ctrl-C and SIGTERM while a run goes on: the first asks for an end in order, the second waits for nobody."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO = 1.0
"""Seconds in which a SIGTERM says what the signal before it said: `timeout`, service managers and job schedulers send
it to a process and to its whole group."""
STOPPING = "stopping: workers get up to ten seconds to end; Ctrl-C once more does not wait for them"


class Interrupts:
    """Hears the signals while entered; only the main thread can. Made in the task that is cancelled to abandon it all.

    say: tells the user that the first signal was heard, where nothing else does. now: seconds, the loop's by default.
    abandoned: why the work was cancelled, "" when it was not.
    """

    def __init__(self, say: Callable[[str], None], now: Callable[[], float] | None = None) -> None:
        self._say = say
        self._now = now or asyncio.get_running_loop().time
        work = asyncio.current_task()
        assert work is not None
        self._work = work
        self._end_in_order: Callable[[], None] | None = None
        self._hurry: Callable[[], None] | None = None
        self._asked_at: float | None = None
        self._heard: list[signal.Signals] = []
        self.abandoned = ""

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            try:
                loop.add_signal_handler(number, self.interrupt, number)
                self._heard.append(number)
            except (ValueError, RuntimeError):
                continue
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._heard:
            asyncio.get_running_loop().remove_signal_handler(number)

    @contextmanager
    def ending_in_order(self, end: Callable[[], None]) -> Iterator[None]:
        """Inside, the first signal calls `end` instead of abandoning the work."""
        self._end_in_order = end
        try:
            yield
        finally:
            self._end_in_order = None

    @contextmanager
    def hurrying(self, hurry: Callable[[], None]) -> Iterator[None]:
        """Inside, the second signal calls `hurry`: whoever is being stopped, or will be, is killed."""
        self._hurry = hurry
        try:
            yield
        finally:
            self._hurry = None

    def interrupt(self, number: signal.Signals) -> None:
        """A signal came."""
        if self._asked_at is not None:
            if number == signal.SIGTERM and self._now() - self._asked_at < ECHO:
                return
            if self._hurry is not None:
                self._hurry()
            self.abandon("interrupted a second time")
            return
        self._asked_at = self._now()
        if self._end_in_order is not None:
            self._end_in_order()
        else:
            self._say(STOPPING)
            self.abandon("interrupted")

    def abandon(self, why: str) -> None:
        """Cancel the work, once: what it then does is to stop its workers, which is bounded."""
        if not self.abandoned:
            self.abandoned = why
            self._work.cancel()
