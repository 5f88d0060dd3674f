import asyncio
from functools import partial

import pytest

from asyncrl.errors import DeadlineExceeded
from asyncrl.lanes.control.deadlines import Deadline, Deadlines
from asyncrl.simulation import virtual_loop


async def wait(deadlines: Deadlines, end: float, seconds: float = 1e6) -> float:
    """Waits within a deadline; returns when it ended the wait."""
    with (
        pytest.raises(DeadlineExceeded, match=f"not before {end}"),
        Deadline(deadlines, end, lambda: f"not before {end}"),
    ):
        await asyncio.sleep(seconds)
    return asyncio.get_running_loop().time()


def test_each_is_reached_in_its_time_unless_it_was_discarded() -> None:
    async def main() -> tuple[list[int], list[float]]:
        deadlines, order = Deadlines(), list[int]()

        def note(number: int, task: "asyncio.Task[float]") -> None:
            order.append(number)

        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(wait(deadlines, end)) for end in (30.0, 10.0, 20.0, 10.0)]
            for number, task in enumerate(waiting):
                task.add_done_callback(partial(note, number))
            with Deadline(deadlines, 15.0, lambda: "discarded"):
                await asyncio.sleep(5)
            await asyncio.sleep(35)
            waiting.append(tasks.create_task(wait(deadlines, 50.0)))
            waiting[-1].add_done_callback(partial(note, 5))
        return order, [task.result() for task in waiting]

    order, at = virtual_loop.run(main())
    assert order == [1, 3, 2, 0, 5]
    assert at == pytest.approx([30, 10, 20, 10, 50])


def test_none_is_reached_after_the_end() -> None:
    async def main() -> None:
        deadlines = Deadlines()
        with Deadline(deadlines, 10.0, lambda: "closed"):
            deadlines.close()
            await asyncio.sleep(20)

    virtual_loop.run(main())


def test_what_a_task_raises_at_its_deadline_gives_way_and_a_cancellation_does_not() -> None:
    async def stubborn(deadlines: Deadlines) -> None:
        with Deadline(deadlines, 10.0, lambda: "overdue"):
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                raise ValueError("of its own") from None

    async def main() -> None:
        deadlines = Deadlines()
        with pytest.raises(DeadlineExceeded, match="overdue"):
            await stubborn(deadlines)
        cancelled = asyncio.ensure_future(wait(deadlines, 30.0))
        asyncio.get_running_loop().call_at(30.0, cancelled.cancel)
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    virtual_loop.run(main())


def test_calls_that_follow_each_other_set_one_timer() -> None:
    async def main() -> int:
        loop, deadlines, timers = asyncio.get_running_loop(), Deadlines(), list[float]()
        call_at = loop.call_at
        loop.call_at = lambda when, *rest, **named: timers.append(when) or call_at(when, *rest, **named)  # type: ignore
        for number in range(100):
            with Deadline(deadlines, 600.0 + number, lambda: ""):
                pass
        deadlines.close()
        return len(timers)

    assert virtual_loop.run(main()) == 1
