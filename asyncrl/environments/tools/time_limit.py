"""Ends a plain function that runs too long, from within its own thread."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN = 1.0
"""Seconds after which a function that caught the interruption is interrupted again."""


class OutOfTime(BaseException):
    """Interrupts a function; not an Exception, so that `except Exception` of the function does not catch it."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the block after so many seconds. Only Python code and what checks for signals in the main
    thread can be interrupted: in another thread, or inside a long operation written in C, the block goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, _interrupt)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # Somebody else waits for an alarm too.
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise OutOfTime
