import asyncio
import threading

import pytest

from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.telemetry.state_clock import Occupancy, StateClock


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def test_time_is_booked_by_what_runs() -> None:
    hand = Hand()
    clock = StateClock(hand)
    occupancy = Occupancy(clock)
    hand.time = 1  # a second of idling
    with occupancy.serving():
        hand.time = 3  # two seconds of waiting for the compute thread
        with occupancy.computing():
            with occupancy.serving():
                hand.time = 6
            hand.time = 7  # four seconds of computing, whatever the calls do
        hand.time = 8
    hand.time = 10
    assert clock.spent()[1] == {"busy": 4, "starved": 3, "blocked": 0, "sync": 0, "overhead": 3}


def test_a_call_that_ends_while_its_function_computes_leaves_the_thread_busy() -> None:
    hand = Hand()
    clock = StateClock(hand)
    occupancy = Occupancy(clock)
    call = occupancy.serving()
    job = occupancy.computing()
    call.__enter__()
    job.__enter__()
    call.__exit__(None, None, None)
    hand.time = 5
    job.__exit__(None, None, None)
    hand.time = 6
    assert (clock.spent()[1]["busy"], clock.spent()[1]["starved"]) == (5, 1)


def test_waiting_for_weights_is_sync_unless_something_computes() -> None:
    hand = Hand()
    clock = StateClock(hand)
    occupancy = Occupancy(clock)
    with occupancy.serving(), occupancy.awaiting_weights():
        hand.time = 2  # two seconds of waiting, in which a call is open
        with occupancy.computing():
            hand.time = 5
        with occupancy.serving():
            hand.time = 6  # another call changes nothing
        hand.time = 9
    hand.time = 10
    assert clock.spent()[1] == {"busy": 3, "starved": 1, "blocked": 0, "sync": 6, "overhead": 0}


def test_an_exchange_on_the_compute_thread_is_sync_whatever_else_happens() -> None:
    hand = Hand()
    clock = StateClock(hand)
    occupancy = Occupancy(clock)
    with occupancy.computing():
        hand.time = 1
        with occupancy.exchanging():
            hand.time = 2
            with occupancy.serving(), occupancy.computing():
                hand.time = 4
            hand.time = 7
        hand.time = 8
    assert clock.spent()[1] == {"busy": 2, "starved": 0, "blocked": 0, "sync": 6, "overhead": 0}


def test_open_calls_for_which_nothing_can_be_computed_are_idle_time() -> None:
    hand = Hand()
    clock = StateClock(hand)
    occupancy = Occupancy(clock)
    with occupancy.serving():
        hand.time = 1
        with occupancy.out_of_work():
            clock.idle_because("blocked")
            hand.time = 3
            with occupancy.awaiting_weights():
                hand.time = 4
            with occupancy.serving():
                hand.time = 8
        hand.time = 9
    assert clock.spent()[1] == {"busy": 0, "starved": 0, "blocked": 6, "sync": 1, "overhead": 2}


async def test_functions_run_one_after_the_other_beside_the_loop() -> None:
    compute = ThreadCompute(Occupancy(StateClock(Hand())))
    first_may_end = threading.Event()
    order = []

    def work(number: int) -> str:
        if number == 0:
            first_may_end.wait(10)
        order.append(number)
        return threading.current_thread().name

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(compute.run(work, number)) for number in range(3)]
        await asyncio.sleep(0)
        assert compute.queued == 3
        first_may_end.set()
    assert order == [0, 1, 2]
    assert {task.result() for task in running} == {"compute"}
    assert compute.queued == 0
    compute.close()


async def test_an_error_comes_out_of_run() -> None:
    compute = ThreadCompute(Occupancy(StateClock(Hand())))
    with pytest.raises(ZeroDivisionError):
        await compute.run(lambda: 1 / 0)
    compute.close()
