"""An asyncio event loop on virtual time: when nothing is ready, its clock jumps to the next timer.

`asyncio.sleep`, `asyncio.timeout` and `loop.time()` work unchanged. Hours of a fleet pass in milliseconds, in the same
way each time. What runs in a thread elsewhere runs here at once, in no time. The code must use no other threads, no
processes and no remote sockets: a loop that only they could wake looks like a deadlock.
"""

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Ends a run in which no task is ready and no timer is set. The message names the pending tasks."""


class Livelock(AssertionError):
    """Ends a run in which tasks run on and on and no time passes."""


MOST_TURNS = 100_000
"""Turns of the loop at one instant; a fleet that starts takes some hundred."""


class _JumpingSelector(selectors.SelectSelector):
    """Polls its files without waiting; a wait is handed to `jump` instead."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            self._turns += 1
            if self._turns > MOST_TURNS:
                raise Livelock(f"{MOST_TURNS} turns of the loop without any time")
            return []  # Nothing outside the loop can become ready, so there is no need to wait.
        self._turns = 0
        # A loop always reads a file of its own, through which only a thread or a signal could wake it.
        ready = super().select(0) if len(self.get_map()) > 1 else []
        if not ready:
            self._jump(timeout)
        return ready


class _Task(asyncio.Task[T]):
    """Hashes a task by its number instead of its address, so that asyncio's sets of tasks have the same order in every
    run."""

    def __init__(self, loop: Any, work: Generator[Any, None, T] | Coroutine[Any, Any, T], **named: Any) -> None:
        self._number: int = next(loop.numbers)
        super().__init__(work, loop=loop, **named)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. `run_until_complete` raises Deadlock and Livelock."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self._jump))
        # asyncio runs a timer once it is less than this away. Far below a microsecond, `now + resolution` would round
        # to `now` after some years of virtual time, and a timer due right now would never run.
        self._clock_resolution = 1e-6
        self.numbers = itertools.count()
        self.set_task_factory(_Task)

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Calls the function in a task of this loop, so that no thread decides what happens when."""

        async def call() -> T:
            return function(*args)

        return self.create_task(call(), name="thread")

    def skip(self, seconds: float) -> None:
        """Lets time pass while nothing runs, as when the clock jumps or a slow disk blocks the thread."""
        self._now += seconds

    def after_turns(self, turns: int, act: Callable[[], None]) -> None:
        """Calls `act` after so many turns of the loop, which can be between any two steps of a task."""
        if turns:
            self.call_soon(self.after_turns, turns - 1, act)
        else:
            act()

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise Deadlock(f"nothing can happen any more at virtual time {self._now:g}; pending: {self.pending()}")
        self._now += seconds

    def pending(self) -> str:
        """Lists all tasks, each with the innermost line of its own code that waits."""
        found = []
        for task in asyncio.all_tasks(self):
            frames = [(frame.f_code.co_qualname, frame.f_lineno) for frame in task.get_stack(limit=1)]
            found.append(task.get_name() + "".join(f" in {name} line {line}" for name, line in frames))
        return ", ".join(sorted(found)) or "no task"


def run(main: Coroutine[Any, Any, T], loop_factory: Callable[[], VirtualLoop] = VirtualLoop) -> T:
    """Runs `main` on a new virtual loop, as `asyncio.run` does on a real one. Raises Deadlock when nothing can run any
    more before `main` is done, and Livelock."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main)
