"""The decode loop: steps the engine on the compute thread in time slices, so that other calls get their turn."""

import threading
import time
from collections.abc import Callable, Iterable

from asyncrl.engines.generation.interface import Completion, GenerationEngine, Key

SLICE_SECONDS = 0.02  # longest wait of another call for the compute thread, plus one decode step


class DecodeLoop:
    """Steps an engine on the compute thread; `pause` and `resume` may be called from any thread.

    Args:
        wanted: returns whether another call waits for the compute thread; a time slice then ends with its step.
    """

    def __init__(self, engine: GenerationEngine, wanted: Callable[[], bool]) -> None:
        self._engine = engine
        self._wanted = wanted
        self._lock = threading.Lock()
        self._paused = False
        self._begun = 0

    @property
    def paused(self) -> bool:
        return self._paused

    def pause(self) -> int:
        """Prevents further steps; returns the number of the last step that has begun."""
        return self._set(paused=True)

    def resume(self) -> int:
        """Allows further steps; returns the number of the last step that has begun."""
        return self._set(paused=False)

    def run(self, aborted: Iterable[Key]) -> tuple[list[Completion], bool]:
        """Runs one time slice: ends aborted requests, then steps until a request finishes or the slice is over.

        Returns:
            The finished requests, and whether there is more to sample.
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
