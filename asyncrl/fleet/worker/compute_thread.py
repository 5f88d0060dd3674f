"""The compute thread of a worker, beside its event loop, so that no torch call delays a message."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple, Unpack

from asyncrl.telemetry.state_clock import Occupancy

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


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
