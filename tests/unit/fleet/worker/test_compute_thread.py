import asyncio
import threading
from collections import defaultdict
from typing import Any

import pytest

from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.telemetry.state_clock import Occupancy, StateClock


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.mark.parametrize(
    ("happens", "busy", "starved", "blocked", "sync", "overhead"),
    [
        # Idle, waiting for the compute thread, and computing, whatever the calls do meanwhile.
        ("1 +serving 3 +computing +serving 6 -serving 7 -computing 8 -serving 10", 4, 3, 0, 0, 3),
        # A call that ends while its function computes leaves the thread busy.
        ("+serving +computing -serving 5 -computing 6", 5, 1, 0, 0, 0),
        # Waiting for weights is sync unless something computes; another call changes nothing.
        ("+serving +awaiting_weights 2 +computing 5 -computing +serving 6 -serving 9 -awaiting_weights -serving 10",
         3, 1, 0, 6, 0),
        # An exchange on the compute thread is sync whatever else happens.
        ("+computing 1 +exchanging 2 +serving +computing 4 -computing -serving 7 -exchanging 8 -computing",
         2, 0, 0, 6, 0),
        # Open calls for which nothing can be computed are idle time.
        ("+serving 1 +out_of_work blocked 3 +awaiting_weights 4 -awaiting_weights +serving 8 -serving -out_of_work 9 "
         "-serving", 0, 0, 6, 1, 2),
    ],
)  # fmt: skip
def test_time_is_booked_by_what_runs(
    happens: str, busy: int, starved: int, blocked: int, sync: int, overhead: int
) -> None:
    """happens: what begins (+) and ends (-), and the seconds on the clock from then on."""
    hand = Hand()
    clock = StateClock(hand)
    occupancy = Occupancy(clock)
    running: dict[str, list[Any]] = defaultdict(list)
    for each in happens.split():
        if each[0] == "+":
            running[each[1:]].append(getattr(occupancy, each[1:])())
            running[each[1:]][-1].__enter__()
        elif each[0] == "-":
            running[each[1:]].pop().__exit__(None, None, None)
        elif each == "blocked":
            clock.idle_because("blocked")
        else:
            hand.time = float(each)
    expected = {"busy": busy, "starved": starved, "blocked": blocked, "sync": sync, "overhead": overhead}
    assert clock.spent()[1] == expected


async def test_functions_run_one_after_the_other_beside_the_loop() -> None:
    compute = ThreadCompute(Occupancy(StateClock(Hand())))
    first_may_end = threading.Event()
    order = []

    def work(number: int) -> str:
        if number == 0:
            first_may_end.wait(10)
        order.append(number)
        if number == 3:
            raise ZeroDivisionError
        return threading.current_thread().name

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(compute.run(work, number)) for number in range(3)]
        await asyncio.sleep(0)
        assert compute.queued == 3
        first_may_end.set()
    assert order == [0, 1, 2]
    assert {task.result() for task in running} == {"compute"}
    assert compute.queued == 0
    with pytest.raises(ZeroDivisionError):
        await compute.run(work, 3)
    compute.close()
