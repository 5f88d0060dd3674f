"""Books a worker's time under exclusive states, whose seconds add up to wall clock."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

State = Literal["busy", "starved", "blocked", "sync", "overhead"]
STATES: tuple[State, ...] = get_args(State)


class StateClock:
    """Books every second of one thread of work (a worker's compute thread) under exactly one state.

    busy: computing; starved: no input; blocked: held back by the gate; sync: exchanging weights or gradients, the wait
    for other workers included; overhead: bookkeeping. Time before the first `enter` is `unaccounted`. Methods may be
    called from any thread. now: a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._seconds: dict[State, float] = dict.fromkeys(STATES, 0.0)
        self._started = now()
        self._since = self._started
        self.current: State | None = None
        self._idle_state: State = "starved"
        self._idle = False

    def enter(self, state: State) -> None:
        """Books time from now on as `state`."""
        with self._lock:
            self._switch(state, idle=False)

    @contextmanager
    def state(self, state: State) -> Iterator[None]:
        """Books the block as `state`, and time after it as the state before."""
        with self._lock:
            before = self.current
            was_idle = self._idle
            self._switch(state, idle=False)
        try:
            yield
        finally:
            with self._lock:
                self._switch(self._idle_state if was_idle else before, idle=was_idle)

    def idle(self) -> None:
        """Books time from now on as idle: `starved` or `blocked`, whichever `idle_because` named last."""
        with self._lock:
            self._switch(self._idle_state, idle=True)

    def idle_because(self, state: State) -> None:
        """Books idle time from now on, the present idle time included, as `starved` or `blocked`."""
        with self._lock:
            self._idle_state = state
            if self._idle:
                self._switch(state, idle=True)

    def spent(self) -> tuple[float, dict[str, float]]:
        """Returns the seconds since the clock was made, and those by state, the present state included, all read
        at the same instant: a thread that is descheduled in between would appear as unaccounted time."""
        with self._lock:
            self._switch(self.current, idle=self._idle)
            return self._since - self._started, {str(state): seconds for state, seconds in self._seconds.items()}

    def _switch(self, state: State | None, *, idle: bool) -> None:
        if state is not None and state not in self._seconds:
            raise ValueError(f"{state!r} is no state of a worker's time; the states are {', '.join(STATES)}")
        now = self._now()
        if self.current is not None:
            self._seconds[self.current] += now - self._since
        self._since = now
        self.current = state
        self._idle = idle
