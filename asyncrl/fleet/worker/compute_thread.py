"""The compute thread of a worker, beside its event loop, so that no torch call delays a message."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, TypeVar, TypeVarTuple, Unpack

from asyncrl.telemetry.state_clock import State, StateClock

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Occupancy:
    """Books a worker's time: busy while something computes, overhead while calls only wait, else idle."""

    def __init__(self, clock: StateClock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._computing = 0
        self._calls = 0
        self._state: State | Literal["idle"] = "idle"
        clock.idle()

    def computing(self) -> AbstractContextManager[None]:
        """Books the block as busy, on the compute thread or in children of this worker."""
        return _Counted(self._count, computing=1, calls=0)

    def serving(self) -> AbstractContextManager[None]:
        """Counts a call of the work lane that is being served during the block."""
        return _Counted(self._count, computing=0, calls=1)

    def _count(self, computing: int, calls: int) -> None:
        left = self._clock.time()
        with self._lock:
            self._computing += computing
            self._calls += calls
            state: State | Literal["idle"] = "busy" if self._computing else "overhead" if self._calls else "idle"
            if state != self._state:
                self._state = state
                self._clock.idle(left) if state == "idle" else self._clock.enter(state, left)


@dataclass(slots=True)
class _Counted(AbstractContextManager[None]):
    """Adds to the counts of an Occupancy during a block, at half the cost of a generator, because every call does."""

    count: Callable[[int, int], None]
    computing: int
    calls: int

    def __enter__(self) -> None:
        self.count(self.computing, self.calls)

    def __exit__(self, *_: object) -> None:
        self.count(-self.computing, -self.calls)


class ThreadCompute:
    """The one compute thread of a worker, which runs functions in the order of the calls.

    queued: functions that have not finished, bounded by the credit of the callers. finished: number of the others.
    """

    def __init__(self, occupancy: Occupancy) -> None:
        self.queued = 0
        self.finished = 0
        self.occupancy = occupancy
        self._executor = ThreadPoolExecutor(1, initializer=_name_compute_thread)

    async def run(self, function: Callable[[Unpack[Arguments]], Result], *args: *Arguments) -> Result:
        """Returns the function's result. Cancelling the wait does not stop a function that has begun."""
        self.queued += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._booked, function, *args)
        finally:
            self.queued -= 1
            self.finished += 1

    def _booked(self, function: Callable[[Unpack[Arguments]], Result], *args: *Arguments) -> Result:
        with self.occupancy.computing():
            return function(*args)

    def close(self) -> None:
        """Drops the functions that have not begun, and takes no more."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _name_compute_thread() -> None:
    """Names the thread for traces and stack dumps."""
    threading.current_thread().name = "compute"
