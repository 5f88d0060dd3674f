"""Deadlines of many calls at the cost of one timer, because nearly all of them are met."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from asyncrl.errors import DeadlineExceeded


class Deadlines:
    """The deadlines of the calls of one client or server."""

    def __init__(self) -> None:
        self._open: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._earliest = inf

    def add(self, deadline: "Deadline") -> None:
        self._open[deadline] = None
        if deadline.end < self._earliest:
            self._wait_until(deadline.end)

    def discard(self, deadline: "Deadline") -> None:
        """Removes a deadline. The timer stays, and then finds the next one."""
        self._open.pop(deadline, None)

    def close(self) -> None:
        """Discards all deadlines."""
        self._open.clear()
        self._wait_until(inf)

    def _wait_until(self, end: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._earliest = end
        self._timer = None if end == inf else asyncio.get_running_loop().call_at(end, self._reach_due)

    def _reach_due(self) -> None:
        now = max(asyncio.get_running_loop().time(), self._earliest)  # A loop may call slightly early.
        due = [deadline for deadline in self._open if deadline.end <= now]
        for deadline in due:
            del self._open[deadline]
        self._wait_until(min([deadline.end for deadline in self._open], default=inf))
        for deadline in due:
            deadline.reach()


@dataclass(eq=False, slots=True)
class Deadline:
    """Cancels the task inside at `end`, in loop time, and raises DeadlineExceeded there with the text of `overdue`.

    Replaces asyncio.timeout, at half its cost, because every call has one on either side.
    """

    deadlines: Deadlines
    end: float
    overdue: Callable[[], str]
    _reached: bool = False
    _cancelled_before: int = 0
    _task: asyncio.Task[object] = field(init=False)

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "calls are made and served by tasks"
        self._task = task
        self._cancelled_before = task.cancelling()
        self.deadlines.add(self)

    def reach(self) -> None:
        self._reached = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.deadlines.discard(self)
        if not self._reached:
            return
        cancelled_by_others = self._task.uncancel() > self._cancelled_before
        if error is not None and not (cancelled_by_others and kind is asyncio.CancelledError):
            raise DeadlineExceeded(self.overdue()) from None
