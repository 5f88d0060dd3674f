"""Books a worker's time under exclusive states, and measures what is left over.

    | busy ......... | gap | starved .... | gap | busy ...        a state ends when a switch is asked for, and the next
                                                                  one begins when the switch is made

The gaps, in which a thread waits for a lock or the interpreter or is descheduled, belong to no state.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

State = Literal["busy", "starved", "blocked", "sync", "overhead"]
STATES: tuple[State, ...] = get_args(State)


class StateClock:
    """Books every second of one thread of work (a worker's compute thread) under exactly one state.

    busy: computing; starved: no input; blocked: held back by the gate; sync: exchanging weights or gradients, the wait
    for other workers included; overhead: bookkeeping. What is left of the wall clock is `unaccounted`: the gaps at
    switches, and the time before the first `enter`. Methods may be called from any thread. now: a monotonic clock in
    seconds.
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

    def time(self) -> float:
        return self._now()

    def enter(self, state: State, left: float | None = None) -> None:
        """Books time from now on as `state`. left: when the state before ended; default: at this call."""
        left = self._now() if left is None else left
        with self._lock:
            self._switch(state, left, idle=False)

    @contextmanager
    def state(self, state: State) -> Iterator[None]:
        """Books the block as `state`, and time after it as the state before."""
        left = self._now()
        with self._lock:
            before = self.current
            was_idle = self._idle
            self._switch(state, left, idle=False)
        try:
            yield
        finally:
            left = self._now()
            with self._lock:
                self._switch(self._idle_state if was_idle else before, left, idle=was_idle)

    def idle(self, left: float | None = None) -> None:
        """Books time from now on as idle: `starved` or `blocked`, whichever `idle_because` named last. left: as in
        `enter`."""
        left = self._now() if left is None else left
        with self._lock:
            self._switch(self._idle_state, left, idle=True)

    def idle_because(self, state: State) -> None:
        """Books idle time from now on, the present idle time included, as `starved` or `blocked`."""
        left = self._now()
        with self._lock:
            self._idle_state = state
            if self._idle:
                self._switch(state, left, idle=True)

    def spent(self) -> tuple[float, dict[str, float]]:
        """Returns the seconds since the clock was made, and those by state, the present state included, all read
        at the same instant: a thread that is descheduled in between would appear as unaccounted time."""
        with self._lock:
            now = self._now()
            self._book(now)
            self._since = now
            return self._since - self._started, {str(state): seconds for state, seconds in self._seconds.items()}

    def _switch(self, state: State | None, left: float, *, idle: bool) -> None:
        if state is not None and state not in self._seconds:
            raise ValueError(f"{state!r} is no state of a worker's time; the states are {', '.join(STATES)}")
        self._book(left)
        self.current = state
        self._idle = idle
        self._since = self._now()

    def _book(self, until: float) -> None:
        """Adds the time of the present state; nothing, if another thread has begun it after `until`."""
        if self.current is not None:
            self._seconds[self.current] += max(0.0, until - self._since)


class Occupancy:
    """Books a worker's time by what happens in it; where several things do, the first of these counts:

    sync: weights or gradients are exchanged on the compute thread; busy: something computes; sync: the worker waits for
    weights, or for readers of weights; overhead: calls only wait; else idle.
    """

    def __init__(self, clock: StateClock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._exchanging = 0
        self._computing = 0
        self._awaiting = 0
        self._calls = 0
        self._out_of_work = 0
        self._state: State | Literal["idle"] = "idle"
        clock.idle()

    def computing(self) -> AbstractContextManager[None]:
        """Books the block as busy, on the compute thread or in children of this worker."""
        return _Counted(self._count, computing=1)

    def serving(self) -> AbstractContextManager[None]:
        """Counts a call of the work lane that is being served during the block."""
        return _Counted(self._count, calls=1)

    def waiting(self) -> AbstractContextManager[None]:
        """Books the block, within `serving`, as idle if nothing else happens: the call waits for a person."""
        return _Counted(self._count, calls=-1)

    def exchanging(self) -> AbstractContextManager[None]:
        """Books the block as sync: the compute thread reads or writes weights, or waits for other ranks."""
        return _Counted(self._count, exchanging=1)

    def awaiting_weights(self) -> AbstractContextManager[None]:
        """Books the block as sync while nothing computes: weights are on their way, or their slot is not free."""
        return _Counted(self._count, awaiting=1)

    def out_of_work(self) -> AbstractContextManager[None]:
        """Books the block as idle if nothing else happens: nothing can be computed for the calls that are open."""
        return _Counted(self._count, out_of_work=1)

    def _count(self, exchanging: int, computing: int, awaiting: int, calls: int, out_of_work: int) -> None:
        left = self._clock.time()
        with self._lock:
            self._exchanging += exchanging
            self._computing += computing
            self._awaiting += awaiting
            self._calls += calls
            self._out_of_work += out_of_work
            if (state := self._state_now()) != self._state:
                self._state = state
                self._clock.idle(left) if state == "idle" else self._clock.enter(state, left)

    def _state_now(self) -> State | Literal["idle"]:
        if self._computing and not self._exchanging:
            return "busy"
        if self._exchanging or self._awaiting:
            return "sync"
        return "overhead" if self._calls > 0 and not self._out_of_work else "idle"


@dataclass(slots=True)
class _Counted(AbstractContextManager[None]):
    """Adds to the counts of an Occupancy during a block, at half the cost of a generator, because every call does."""

    count: Callable[[int, int, int, int, int], None]
    exchanging: int = 0
    computing: int = 0
    awaiting: int = 0
    calls: int = 0
    out_of_work: int = 0

    def __enter__(self) -> None:
        self.count(self.exchanging, self.computing, self.awaiting, self.calls, self.out_of_work)

    def __exit__(self, *_: object) -> None:
        self.count(-self.exchanging, -self.computing, -self.awaiting, -self.calls, -self.out_of_work)
