"""Calls whose answer is awaited: one reply or the items of a stream, and deadlines of many at the cost of one timer."""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from asyncrl.concurrency import STANDSTILL
from asyncrl.errors import AsyncrlError, DeadlineExceeded, PeerLost, WireError
from asyncrl.lanes.control.wire import Wakeup

STREAM_WINDOW = 64
"""Items of one stream that may be in flight or wait for the consumer; then the worker waits for `More`."""


class PendingReply:
    """A call with one reply. settled: whether the worker has nothing more to send for it."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.settled = False

    def add_item(self, value: Any) -> None:
        raise WireError("an item of a stream came for a call that has one reply")

    def complete(self, value: Any) -> None:
        self.settled = True
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: AsyncrlError) -> None:
        self.settled = True
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # Marks it as retrieved: a caller that is cancelled now never reads it.

    def lose_peer(self, reason: str) -> None:
        self.fail(PeerLost(reason))


class PendingStream:
    """A call with a stream, of which at most STREAM_WINDOW items wait here. Its error comes after its items; a lost
    peer discards them."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = Wakeup()
        self._error: AsyncrlError | None = None
        self._taken = 0
        self.settled = False

    def add_item(self, value: Any) -> None:
        if len(self._items) >= STREAM_WINDOW:
            raise WireError(f"more than {STREAM_WINDOW} items of a stream came without being granted")
        self._items.append(value)
        self._changed.wake()

    def complete(self, value: Any) -> None:
        self.settled = True
        self._changed.wake()

    def fail(self, error: AsyncrlError) -> None:
        self._error = error
        self.complete(None)

    def lose_peer(self, reason: str) -> None:
        self._items.clear()
        self.fail(PeerLost(reason))

    async def has_item(self) -> bool:
        """Waits until it is known whether there is another item for `take_item`. Raises the error of the stream."""
        while not self._items and not self.settled:
            await self._changed.wait()
        if not self._items and self._error is not None:
            raise self._error
        return bool(self._items)

    def take_item(self) -> Any:
        self._taken += 1
        return self._items.popleft()

    def grant(self) -> int:
        """Returns how many more items the worker may send: 0 until half a window was consumed since the last grant."""
        granted = 0 if self.settled or self._taken < STREAM_WINDOW // 2 else self._taken
        self._taken -= granted
        return granted


# Deadlines of many calls at the cost of one timer, because nearly all of them are met.
#
# A deadline counts work, not queues. Calls wait for those that were made before them, so a deadline runs from the
# last answer to an earlier call, or from the last progress that the peer reports. A peer that neither answers nor
# reports for the time of a deadline exceeds it, and so does a call that is stuck while later ones are answered. Where
# this process itself stood still, answers may wait to be read, and all deadlines run anew.


MOST_ANSWERS = 1024
"""Answers of which number and time are known. Of more, two neighbours become one: a call that is stuck behind so many
later ones is found late, within twice its deadline."""


class Deadlines:
    """The deadlines of the calls of one client or server, of which the next one to come has the only timer.

    Invariant: no open deadline ends before the timer, because progress and answers only ever extend a deadline.
    `Client` and `Server` open them around calls, and report progress and answers.
    """

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
