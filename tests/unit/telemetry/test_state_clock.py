"""The state clock: every second under one state, and the sum is wall clock."""

import itertools
import random
import time
from pathlib import Path
from threading import get_native_id

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.telemetry.state_clock import STATES, Occupancy, StateClock

BURNT = 0.25
"""CPU-seconds that a thread burns."""


class Ticks:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def unaccounted(clock: StateClock) -> float:
    wall, seconds = clock.spent()
    return wall - sum(seconds.values())


def test_time_goes_to_the_entered_state_and_before_it_to_none() -> None:
    ticks = Ticks()
    clock = StateClock(ticks)
    ticks.time += 1
    clock.enter("busy")
    ticks.time += 2
    clock.enter("sync")
    ticks.time += 4
    assert clock.spent()[1] == {"busy": 2, "starved": 0, "blocked": 0, "sync": 4, "overhead": 0}
    assert clock.spent()[0] == 7
    assert unaccounted(clock) == 1


def test_a_scope_returns_to_the_state_before_it_also_when_it_raises() -> None:
    ticks = Ticks()
    clock = StateClock(ticks)
    clock.enter("overhead")

    def fail() -> None:
        ticks.time += 3
        raise RuntimeError

    with pytest.raises(RuntimeError), clock.state("busy"):
        fail()
    ticks.time += 1
    assert clock.current == "overhead"
    assert clock.spent()[1]["busy"] == 3
    assert clock.spent()[1]["overhead"] == 1


def test_idle_time_changes_its_reason_while_it_lasts() -> None:
    ticks = Ticks()
    clock = StateClock(ticks)
    clock.idle()
    ticks.time += 1
    clock.idle_because("blocked")
    ticks.time += 2
    with clock.state("busy"):
        clock.idle_because("starved")
        assert clock.current == "busy", "a reason for idling does not end work"
        ticks.time += 4
    ticks.time += 8
    assert clock.spent()[1] == {"busy": 4, "starved": 9, "blocked": 2, "sync": 0, "overhead": 0}


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(ValueError, match="sleepy"):
        StateClock(Ticks()).enter("sleepy")  # type: ignore[arg-type]


class Slow(Ticks):
    """A clock by which every reading takes a second, as if the thread lost the processor there."""

    def __call__(self) -> float:
        self.time += 1
        return self.time


def test_what_a_switch_costs_is_measured_and_belongs_to_no_state() -> None:
    slow = Slow()
    clock = StateClock(slow)
    clock.enter("busy")
    before = unaccounted(clock)
    for state in ("overhead", "sync", "busy"):
        slow.time += 10
        clock.enter(state)
    assert unaccounted(clock) - before == 3, "a second in each switch"
    with clock.state("sync"):
        clock.idle_because("blocked")
    assert unaccounted(clock) - before == 5


def test_the_wait_for_the_lock_of_a_switch_is_unaccounted() -> None:
    ticks = Ticks()
    clock = StateClock(ticks)
    clock.enter("busy")
    ticks.time += 4
    asked = clock.time()
    ticks.time += 2
    clock.enter("overhead", asked)
    ticks.time += 1
    assert clock.spent() == (7, {"busy": 4, "starved": 0, "blocked": 0, "sync": 0, "overhead": 1})
    clock.enter("busy")
    ticks.time += 1
    clock.enter("sync", asked)
    assert clock.spent() == (8, {"busy": 4, "starved": 0, "blocked": 0, "sync": 0, "overhead": 1}), "never less"


@given(seed=st.integers(0, 2**32))
def test_states_add_up_to_wall_clock(seed: int) -> None:
    draw = random.Random(seed)
    steps = itertools.accumulate(draw.random() for _ in range(10_000))
    clock = StateClock(lambda: next(steps))
    clock.enter("overhead")
    for _ in range(50):
        if draw.random() < 0.5:
            clock.enter(draw.choice(STATES))
        else:
            with clock.state(draw.choice(STATES)):
                clock.idle_because(draw.choice(("starved", "blocked")))
                clock.idle()
    wall, seconds = clock.spent()
    assert 0 <= sum(seconds.values()) <= wall
    before = unaccounted(clock)
    assert unaccounted(clock) == pytest.approx(before, abs=1e-9), "reading takes no time of its own"


async def test_state_clock_and_scheduler_agree_on_a_thread_that_burns() -> None:
    """Also on a crowded machine, where the thread mostly waits for a CPU: Linux counts both."""
    clock = StateClock(time.monotonic)
    compute = ThreadCompute(Occupancy(clock))

    def burn() -> Path:
        until = time.thread_time() + BURNT
        while time.thread_time() < until:
            pass
        return Path(f"/proc/self/task/{get_native_id()}/schedstat")

    schedstat = await compute.run(burn)
    busy = clock.spent()[1]["busy"]
    ran, waited, _ = schedstat.read_text().split()
    compute.close()
    assert busy >= BURNT
    assert (int(ran) + int(waited)) / 1e9 == pytest.approx(busy, rel=0.02)
