"""Books a worker's time under exclusive states, whose seconds add up to wall clock."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

State = Literal["busy", "starved", "blocked", "sync", "overhead"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True, slots=True)
class Spent:
    """The time of a clock so far. wall: seconds since the clock was made. seconds: by state, read at the same instant,
    because a thread that is descheduled between two readings would appear as unaccounted time."""

    wall: float
    seconds: dict[str, float]

    @property
    def unaccounted(self) -> float:
        """Seconds booked under no state."""
        return self.wall - sum(self.seconds.values())


class StateClock:
    """Books every second of one thread of work (a worker's compute thread) under exactly one state.

    busy: computing; starved: no input; blocked: held back by the gate; sync: exchanging weights or gradients, the wait
    for other workers included; overhead: bookkeeping. Time before the first `enter` is `unaccounted`. Methods may be
    called from any thread.

    Args:
        now: a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._seconds: dict[State, float] = dict.fromkeys(STATES, 0.0)
        self._started = now()
        self._since = self._started
        self._state: State | None = None
        self._idle_state: State = "starved"
        self._idle = False

    @property
    def current(self) -> State | None:
        return self._state

    def enter(self, state: State) -> None:
        """Books time from now on as `state`."""
        with self._lock:
            self._switch(state)
            self._idle = False

    @contextmanager
    def state(self, state: State) -> Iterator[None]:
        """Books the block as `state`, and time after it as the state before."""
        with self._lock:
            before = self._state
            was_idle = self._idle
            self._switch(state)
            self._idle = False
        try:
            yield
        finally:
            with self._lock:
                self._switch(self._idle_state if was_idle else before)
                self._idle = was_idle

    def idle(self) -> None:
        """Books time from now on as idle: `starved` or `blocked`, whichever `idle_because` named last."""
        with self._lock:
            self._switch(self._idle_state)
            self._idle = True

    def idle_because(self, state: State) -> None:
        """Books idle time from now on, the present idle time included, as `starved` or `blocked`."""
        with self._lock:
            self._idle_state = state
            if self._idle:
                self._switch(state)

    def spent(self) -> Spent:
        """Returns the time so far, the present state included."""
        with self._lock:
            self._switch(self._state)
            seconds = {str(state): seconds for state, seconds in self._seconds.items()}
            return Spent(self._since - self._started, seconds)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds by state so far, the present state included."""
        return self.spent().seconds

    def _switch(self, state: State | None) -> None:
        if state is not None and state not in self._seconds:
            raise ValueError(f"{state!r} is no state of a worker's time; the states are {', '.join(STATES)}")
        now = self._now()
        if self._state is not None:
            self._seconds[self._state] += now - self._since
        self._since = now
        self._state = state
