import asyncio

import pytest

from asyncrl.lanes.control.deadlines import Deadlines
from asyncrl.simulation import virtual_loop


def test_each_is_reached_in_its_time_unless_it_was_discarded() -> None:
    async def main() -> list[tuple[int, float]]:
        loop, deadlines, reached = asyncio.get_running_loop(), Deadlines(), list[tuple[int, float]]()
        for number, end in enumerate([30.0, 10.0, 20.0, 10.0, 15.0]):
            deadlines.add(number, end, lambda number=number: reached.append((number, loop.time())))  # type: ignore[misc]
        deadlines.discard(4)
        deadlines.discard(99)
        await asyncio.sleep(40)
        deadlines.add(5, 50.0, lambda: reached.append((5, loop.time())))
        await asyncio.sleep(20)
        return reached

    found = virtual_loop.run(main())
    assert [number for number, _ in found] == [1, 3, 2, 0, 5]
    assert [at for _, at in found] == pytest.approx([10, 10, 20, 30, 50])


def test_none_is_reached_after_the_end() -> None:
    async def main() -> list[int]:
        deadlines, reached = Deadlines(), list[int]()
        deadlines.add(0, 10.0, lambda: reached.append(0))
        deadlines.close()
        await asyncio.sleep(20)
        return reached

    assert virtual_loop.run(main()) == []


def test_calls_that_follow_each_other_set_one_timer() -> None:
    async def main() -> int:
        loop, deadlines, timers = asyncio.get_running_loop(), Deadlines(), list[float]()
        call_at = loop.call_at
        loop.call_at = lambda when, *rest, **named: timers.append(when) or call_at(when, *rest, **named)  # type: ignore
        for number in range(100):
            deadlines.add(number, 600.0 + number, lambda: None)
            deadlines.discard(number)
        deadlines.close()
        return len(timers)

    assert virtual_loop.run(main()) == 1
