"""A run on virtual time with workers of its own, whose samples differ in length: what the controller spends on each.

Only callbacks of the controller's tasks are timed: handles, connections, codec, gate, journal and algorithm, with the
in-process wire. Not timed are the event loop between callbacks, sockets, the recorder's files, and the collector of
garbage, which here scans the objects of all workers too.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from asyncrl.controller.observers.events import Event, StepDone
from asyncrl.simulation.large_fleet import LargeFleet, WatchedLoop, run_large_fleet

GROUPS, MEMBERS = 64, 16
STEPS, TIMED_FROM = 9, 3
"""Steps of the run, and the one after which they are timed, because then the first draw is scored."""


@dataclass
class _Timed:
    """steps: CPU-microseconds a sample of each timed step."""

    steps: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def observe(self, event: Event) -> None:
        if not isinstance(event, StepDone):
            return
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WatchedLoop)
        if loop.controller_scope is not None:
            self.steps.append(1e6 * self.seconds / len(event.cuts.batch))
        elif event.report.version == TIMED_FROM:
            loop.controller_scope = self._time
        self.seconds = 0.0

    def _time(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        began = time.thread_time()
        callback(*args)
        self.seconds += time.thread_time() - began


def _different(chance: random.Random) -> int:
    return chance.randrange(20, 60)


def controller_all_in(workers: int) -> float:
    """Returns the median over steps of CPU-microseconds a sample, with about 100 samples in flight for each worker."""
    scorers = workers * 3 // 10
    shape = LargeFleet(
        groups=GROUPS,
        members=MEMBERS,
        limit=max(1, workers // 10 - 2),
        steps=STEPS,
        step_time=5.0,
        generators=workers - scorers - 1,
        scorers=scorers,
        checkpoint_every=STEPS + 1,
        admission="full",
        lengths=_different,
    )
    timed = _Timed()
    run_large_fleet(shape, timed.observe)
    return median(timed.steps)
