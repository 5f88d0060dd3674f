"""Ends a run in order: Ctrl-C, SIGTERM and the end of a terminal (SIGHUP), of which the second does not wait for
workers, and the interrupt of a notebook, where an event loop runs already."""

import asyncio
import re
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

from asyncrl.errors import AsyncrlError

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


# Runs a coroutine to its end, also where an event loop runs already, as in a notebook, and says errors in Python.


T = TypeVar("T")
INTERRUPTIBLE = 0.5
"""Seconds between checks of a waiting thread, which an interrupt just before its wait does not wake."""
FLAGS = {
    "--accept-changes": "accept_changes=True",
    "--run-dir": "run_dir",
    "--model.name FOLDER": 'model="FOLDER"',
    "--prompts": "prompts",
    "--step": "step",
}
"""Arguments of calls from Python, by the flags that errors name."""


async def in_python(work: Coroutine[Any, Any, T]) -> T:
    """Awaits work whose errors a caller from Python gets: without the errors of tasks that they came from, for which
    notebooks print a text and no error of the cell, and with arguments in place of flags, outside of commands."""
    try:
        return await work
    except AsyncrlError as error:
        parts = str(error).split("`")
        flags = re.compile("|".join(rf"{re.escape(flag)}(?![\w-]|\.\w)" for flag in FLAGS))
        parts[::2] = [flags.sub(lambda found: FLAGS[found[0]], part) for part in parts[::2]]
        error.args = ("`".join(parts),)
        error.__context__ = None
        raise error.with_traceback(None) from None
    finally:  # Errors of the user's code that runs here are shown as they are.
        if (raised := sys.exception()) is not None and isinstance(raised.__context__, BaseExceptionGroup):
            raised.__context__ = None


def run_here_or_beside(work: Coroutine[Any, Any, T]) -> T:
    """Runs to the end on this thread, or on another thread if an event loop runs here already (Jupyter)."""
    return _run_beside(work) if _is_running_loop() else asyncio.run(in_python(work))


def _is_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_beside(work: Coroutine[Any, Any, T]) -> T:
    """Runs on another thread. A notebook interrupts only the waiting thread, which passes the interrupt on and waits:
    the first one ends a run in order, with a checkpoint."""
    interrupts: list[KeyboardInterrupt] = []
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def interruptible() -> T:
        task = asyncio.current_task()
        assert task is not None
        begun.append((asyncio.get_running_loop(), task))
        if interrupts:  # The interrupt came before the task existed.
            task.cancel()
        return await in_python(work)

    supervised = interruptible()
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="asyncrl.train") as beside:
            beside.submit(int).result()  # The thread is there before its work: an executor joins those it has noted.
            try:
                done = beside.submit(asyncio.run, supervised)
            except KeyboardInterrupt as pressed:  # It may be handed over already.
                _pass_on(pressed, interrupts, begun)
                raise
            while not done.done():
                try:
                    wait([done], INTERRUPTIBLE)
                except KeyboardInterrupt as pressed:
                    _pass_on(pressed, interrupts, begun)
            if interrupts:
                raise interrupts[0] from done.exception()
            return done.result()
    finally:
        for each in (supervised, work):  # A coroutine that never started is closed.
            each.close()


def _pass_on(
    pressed: KeyboardInterrupt,
    interrupts: list[KeyboardInterrupt],
    begun: Sequence[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]],
) -> None:
    """Passes an interrupt of this thread on to the task that has begun."""
    interrupts.append(pressed)
    for loop, task in begun:
        with suppress(RuntimeError):  # The loop is closed, because the run has ended.
            loop.call_soon_threadsafe(interrupt, task)
