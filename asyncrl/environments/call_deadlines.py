"""Deadlines of the user's calls in a child, with one timer for all of them."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

GRACE = 1.0
"""Seconds in which a late coroutine may end after its cancellation."""


@dataclass(eq=False, slots=True)
class UserCall:
    """A call of the user's code. late: it was cancelled, because it took too long. given_up: it went on all the same,
    and nobody waits for it."""

    late: bool = False
    given_up: bool = False
    task: "asyncio.Task[Any] | None" = None


@dataclass(eq=False, slots=True)
class CallDeadlines:
    """Cancels calls that wait for longer than `seconds`, and does so again when one has not ended GRACE seconds later.
    Each may take as long as the others, so that they are due in the order in which they began."""

    seconds: float
    _due: dict[UserCall, float] = field(default_factory=dict)
    _timer: asyncio.TimerHandle | None = None

    def begin(self, call: UserCall) -> None:
        """Watches a call from its first wait on. It runs in the current task, which is cancelled."""
        loop = asyncio.get_running_loop()
        call.task = asyncio.current_task()
        self._due[call] = loop.time() + self.seconds
        if self._timer is None:
            self._timer = loop.call_at(self._due[call], self._cancel_late)

    def end(self, call: UserCall) -> None:
        """Forgets a call that has ended, or never waited."""
        self._due.pop(call, None)
        call.task = None

    def _cancel_late(self) -> None:
        loop = asyncio.get_running_loop()
        now, self._timer = loop.time(), None
        for call, due in list(self._due.items()):
            if due > now:
                self._timer = loop.call_at(due, self._cancel_late)
                return
            del self._due[call]
            call.late = True
            _cancel(call)
            loop.call_later(GRACE, self._give_up, call)

    def _give_up(self, call: UserCall) -> None:
        call.given_up = True
        _cancel(call)


def _cancel(call: UserCall) -> None:
    if call.task is not None:
        call.task.cancel()
