"""Where a worker's time goes: exclusive states whose seconds add up to wall clock."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

State = Literal["busy", "starved", "blocked", "sync", "overhead"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True, slots=True)
class Spent:
    """wall: seconds since a clock was made; seconds: by state, read at the same instant, or a thread that is put aside
    between the two readings would look like time that nobody accounts for."""

    wall: float
    seconds: dict[str, float]

    @property
    def unaccounted(self) -> float:
        """Seconds booked under no state."""
        return self.wall - sum(self.seconds.values())


class StateClock:
    """Books every second of one thread of work (a worker's compute thread) under exactly one state.

    busy: computing; starved: no input; blocked: held back by the gate; sync: exchanging weights or gradients, the wait
    for who takes part included; overhead: our own bookkeeping. Time before the first `enter` is `unaccounted`. Methods
    may be called from any thread.

    Args:
        now: a clock in seconds that never goes back.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._seconds: dict[State, float] = dict.fromkeys(STATES, 0.0)
        self._started = self._since = now()
        self._state: State | None = None
        self._idle_state: State = "starved"
        self._idle = False

    @property
    def current(self) -> State | None:
        return self._state

    def enter(self, state: State) -> None:
        """From now on time goes to `state`."""
        with self._lock:
            self._switch(state)
            self._idle = False

    @contextmanager
    def state(self, state: State) -> Iterator[None]:
        """Time inside goes to `state`; afterwards to what it went to before."""
        with self._lock:
            before, was_idle = self._state, self._idle
            self._switch(state)
            self._idle = False
        try:
            yield
        finally:
            with self._lock:
                self._switch(self._idle_state if was_idle else before)
                self._idle = was_idle

    def idle(self) -> None:
        """There is nothing to do: time goes to `starved` or `blocked`, whichever `idle_because` named last."""
        with self._lock:
            self._switch(self._idle_state)
            self._idle = True

    def idle_because(self, state: State) -> None:
        """Book idle time from now on, the present one included, as `starved` or `blocked`."""
        with self._lock:
            self._idle_state = state
            if self._idle:
                self._switch(state)

    def spent(self) -> Spent:
        """Where the time went so far, the running state included."""
        with self._lock:
            self._switch(self._state)
            seconds = {str(state): seconds for state, seconds in self._seconds.items()}
            return Spent(self._since - self._started, seconds)

    def seconds(self) -> dict[str, float]:
        """Seconds by state so far, the running state included."""
        return self.spent().seconds

    def _switch(self, state: State | None) -> None:
        if state is not None and state not in self._seconds:
            raise ValueError(f"{state!r} is no state of a worker's time; there are {', '.join(STATES)}")
        now = self._now()
        if self._state is not None:
            self._seconds[self._state] += now - self._since
        self._since, self._state = now, state
