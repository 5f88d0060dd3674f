"""The scheduler of the operating system and the state clock agree on how long a worker was busy."""

import time
from pathlib import Path
from threading import get_native_id

import pytest

from asyncrl.bench.overlap.cpu_agreement import BusySeconds, runnable_seconds
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.telemetry.state_clock import Occupancy, StateClock

BURNT = 0.25


def test_the_largest_difference_of_two_sources_counts() -> None:
    assert BusySeconds(10.0, 9.9, 10.05, 0.5).disagreement == pytest.approx(0.015)
    assert BusySeconds(10.0, 10.0, 10.0, 1.0).disagreement == 0.0


def test_a_thread_is_runnable_while_it_runs_and_while_it_waits_for_a_cpu() -> None:
    assert runnable_seconds("1500000000 250000000 7\n") == (1.5, 0.25)


async def test_state_clock_and_scheduler_agree_on_a_thread_that_burns() -> None:
    """Also on a crowded machine, where the thread mostly waits for a CPU."""
    clock = StateClock(time.monotonic)
    compute = ThreadCompute(Occupancy(clock))

    def burn() -> Path:
        until = time.thread_time() + BURNT
        while time.thread_time() < until:
            pass
        return Path(f"/proc/self/task/{get_native_id()}/schedstat")

    schedstat = await compute.run(burn)
    busy, seconds = clock.spent()[1]["busy"], sum(runnable_seconds(schedstat.read_text()))
    compute.close()
    assert busy >= BURNT
    assert seconds == pytest.approx(busy, rel=0.02)
