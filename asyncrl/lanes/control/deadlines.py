"""Deadlines of many calls at the cost of one timer, because nearly all of them are met.

A deadline counts work, not queues. Calls wait for those that were made before them, so a deadline runs from the last
answer to an earlier call, or from the last progress that the peer reports. A peer that neither answers nor reports for
the time of a deadline exceeds it, and so does a call that is stuck while later ones are answered. Where this process
itself stood still, answers may wait to be read, and all deadlines run anew.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from asyncrl.concurrency import STANDSTILL
from asyncrl.errors import DeadlineExceeded

MOST_ANSWERS = 1024
"""Answers of which number and time are known. Of more, two neighbours become one: a call that is stuck behind so many
later ones is found late, within twice its deadline."""


class Deadlines:
    """The deadlines of the calls of one client or server."""

    def __init__(self) -> None:
        self._progressed_at = -inf
        self._numbers: list[int] = []  # of answered calls, rising, with the times of their last answers beside
        self._times: list[float] = []
        self._open: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._earliest = inf

    def add(self, deadline: "Deadline") -> None:
        self._open[deadline] = None
        if (end := deadline.began + deadline.seconds) < self._earliest:
            self._wait_until(end)

    def discard(self, deadline: "Deadline") -> None:
        """Removes a deadline. The timer stays, and then finds the next one."""
        self._open.pop(deadline, None)

    def note_progress(self) -> None:
        """Lets every open deadline run from now on anew. The timer stays, and finds them extended."""
        self._progressed_at = asyncio.get_running_loop().time()

    def note_answer(self, number: int) -> None:
        """Lets the deadlines of this call and of later ones run from now on anew."""
        while self._numbers and self._numbers[-1] >= number:
            self._numbers.pop()
            self._times.pop()
        self._numbers.append(number)
        self._times.append(asyncio.get_running_loop().time())
        if len(self._numbers) > MOST_ANSWERS:
            self._numbers = [*self._numbers[:-1:2], self._numbers[-1]]
            self._times = [*self._times[1:-1:2], self._times[-1]]

    def progress_for(self, number: int) -> float:
        """Returns the loop time of the last progress with this call, or with one that it may wait for."""
        earlier = bisect_right(self._numbers, number)
        return max(self._progressed_at, self._times[earlier - 1]) if earlier else self._progressed_at

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
        if asyncio.get_running_loop().time() > self._earliest + STANDSTILL:
            self.note_progress()
        now = max(asyncio.get_running_loop().time(), self._earliest)  # A loop may call slightly early.
        due = [deadline for deadline in self._open if deadline.end <= now]
        for deadline in due:
            del self._open[deadline]
        self._wait_until(min([deadline.end for deadline in self._open], default=inf))
        for deadline in due:
            deadline.reach()


@dataclass(eq=False, slots=True)
class Deadline:
    """Cancels the task inside after `seconds` without progress, and raises DeadlineExceeded there with the text of
    `overdue`. number: of the call; those with smaller ones were made earlier.

    Replaces asyncio.timeout, at half its cost, because every call has one on either side.
    """

    deadlines: Deadlines
    number: int
    seconds: float
    overdue: Callable[[], str]
    began: float = field(init=False)
    _reached: bool = False
    _cancelled_before: int = 0
    _task: asyncio.Task[object] = field(init=False)

    @property
    def end(self) -> float:
        """Returns the loop time at which it is reached if there is no further progress."""
        return max(self.began, self.deadlines.progress_for(self.number)) + self.seconds

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "calls are made and served by tasks"
        self._task = task
        self.began = asyncio.get_running_loop().time()
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
