"""Decoding in slices: the compute thread steps the engine for a moment, then sees what else waits for it."""

import threading
import time
from collections.abc import Callable, Iterable

from asyncrl.engines.generation.interface import Completion, GenerationEngine, Key

SLICE_SECONDS = 0.02  # what a call that needs the compute thread waits at most, one decode step aside


class Slices:
    """Steps an engine on the compute thread; `pause` and `resume` may be called from any thread.

    Args:
        wanted: whether something else waits for the compute thread; a slice then ends with its step.
    """

    def __init__(self, engine: GenerationEngine, wanted: Callable[[], bool]) -> None:
        self._engine, self._wanted = engine, wanted
        self._lock = threading.Lock()
        self._paused = False
        self._begun = 0

    @property
    def paused(self) -> bool:
        return self._paused

    def pause(self) -> int:
        """Begin no further step; returns the number of the last one that has begun."""
        return self._set(paused=True)

    def resume(self) -> int:
        return self._set(paused=False)

    def run(self, aborted: Iterable[Key]) -> tuple[list[Completion], bool]:
        """End what was aborted, then step until something finishes, something else is wanted, or the slice is over.

        Returns:
            What finished, and whether there is more to sample.
        """
        self._engine.end(aborted, "abort")
        until = time.monotonic() + SLICE_SECONDS
        done: list[Completion] = []
        while not done and self._engine.active and self._may_begin():
            done = self._engine.step()
            if self._wanted() or time.monotonic() >= until:
                break
        return done, self._engine.active

    def _may_begin(self) -> bool:
        with self._lock:
            self._begun += not self._paused
            return not self._paused

    def _set(self, *, paused: bool) -> int:
        with self._lock:
            self._paused = paused
            return self._begun
