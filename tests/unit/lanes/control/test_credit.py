"""Credit of a connection: first come, first served, at a cost that does not grow with the calls that wait."""

import asyncio
from contextlib import suppress

from asyncrl.lanes.control.client import Credit
from asyncrl.simulation import virtual_loop
from tests.instruction_count import counting


async def _turns(loops: int = 3) -> None:
    for _ in range(loops):
        await asyncio.sleep(0)


async def test_credit_goes_to_the_call_that_has_waited_longest() -> None:
    credit = Credit()
    order = list[int]()

    async def call(number: int) -> None:
        await credit.take()
        order.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(call(number))
        await _turns()
        credit.give(1)
        await _turns()
        assert order == [0]
        credit.give(3)
    assert order == [0, 1, 2, 3]


async def test_a_call_that_is_cancelled_while_it_waits_takes_no_credit() -> None:
    credit = Credit()
    first, second = (asyncio.ensure_future(credit.take()) for _ in range(2))
    await _turns()
    first.cancel()
    await _turns()
    credit.give(1)
    await asyncio.wait_for(second, 10)


async def test_a_call_that_is_cancelled_in_the_moment_it_gets_credit_hands_it_on() -> None:
    credit = Credit()
    first, second = (asyncio.ensure_future(credit.take()) for _ in range(2))
    await _turns()
    credit.give(1)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    await asyncio.wait_for(second, 10)


async def test_the_end_of_a_connection_lets_every_call_go_on() -> None:
    credit = Credit()
    waiting = [asyncio.ensure_future(credit.take()) for _ in range(3)]
    await _turns()
    credit.end()
    await asyncio.wait_for(asyncio.gather(*waiting, credit.take()), 10)


def test_the_cost_of_a_call_does_not_grow_with_the_calls_that_wait() -> None:
    small = _instructions(100)
    large = _instructions(2000)
    assert large <= 1.2 * small


def _instructions(calls: int) -> float:
    """Returns the instructions a call, when so many wait on a connection that grants four."""

    async def call(credit: Credit) -> None:
        await credit.take()
        await asyncio.sleep(1)
        credit.give(1)

    async def main() -> float:
        credit = Credit()
        credit.give(4)
        with counting() as count:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(calls):
                    tasks.create_task(call(credit))
        return count.instructions / calls

    return virtual_loop.run(main())
