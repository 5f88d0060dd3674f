"""Holds a run back by command: while the switch is on, no group is drawn and no step begins.

What runs already goes on: samples in flight are generated and scored, and wait; a running step ends. No version is
published meanwhile, so nothing that waits gets older, and every bound holds as before.
"""

import asyncio
from collections.abc import Callable


class PauseSwitch:
    """Is off at first. subscribers: called after each change; they must not block."""

    def __init__(self) -> None:
        self.on = False
        self.subscribers: list[Callable[[], None]] = []
        self._since = 0.0
        self._seconds = 0.0

    def turn(self, on: bool) -> bool:
        """Turns the switch on or off; returns whether that changed it."""
        if on == self.on:
            return False
        now = asyncio.get_running_loop().time()
        self._seconds += now - self._since if self.on else 0.0
        self._since = now
        self.on = on
        for subscriber in self.subscribers:
            subscriber()
        return True

    def take_seconds(self) -> float:
        """Returns for how many seconds the switch was on since it was asked before."""
        now = asyncio.get_running_loop().time()
        taken = self._seconds + (now - self._since if self.on else 0.0)
        self._seconds = 0.0
        self._since = now
        return taken
