import asyncio
import inspect
from typing import NoReturn

import pytest

from asyncrl.concurrency import gather, one_error, running_beside, running_timeout, start_task, unwrap
from asyncrl.errors import FleetFailed, LostRows, PeerLost
from asyncrl.simulation import virtual_loop


async def value(number: int) -> int:
    await asyncio.sleep(0)
    return number


async def forever() -> None:
    await asyncio.Event().wait()


async def fail(error: Exception) -> NoReturn:
    await asyncio.sleep(0)
    raise error


async def test_results_come_in_order() -> None:
    assert await gather(value(1), value(2), value(3)) == (1, 2, 3)


async def test_both_keep_their_types_and_errors_come_bare() -> None:
    async def text() -> str:
        return "a"

    assert await gather(value(1), text()) == (1, "a")
    with pytest.raises(LostRows, match="gone"):
        await gather(asyncio.Event().wait(), fail(LostRows("gone")))


async def test_the_first_error_ends_the_others() -> None:
    ended = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(KeyError):
        await gather(waits(), fail(KeyError()))
    assert ended.is_set()


async def test_what_went_wrong_matters_more_than_what_was_lost() -> None:
    with pytest.raises(KeyError):
        await gather(fail(LostRows("rows were freed")), fail(KeyError()))


async def test_being_cancelled_wins_over_errors_while_ending() -> None:
    """What a TaskGroup of Python 3.11 gets wrong."""

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError

    task = asyncio.ensure_future(gather(stubborn(), stubborn()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_runs_beside_a_block_ends_with_it() -> None:
    ended = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with running_beside({"waits": waits()}):
        await asyncio.sleep(0)
    assert ended.is_set()


async def test_an_error_beside_a_block_ends_the_block_and_comes_bare() -> None:
    with pytest.raises(KeyError):
        async with running_beside({"fails": fail(KeyError())}):
            await asyncio.Event().wait()


async def test_an_error_of_the_block_comes_bare() -> None:
    with pytest.raises(LostRows, match="gone"):
        async with running_beside({"waits": forever()}):
            raise LostRows("gone")


def test_one_error_of_several_is_raised_with_its_own_cause() -> None:
    reason = ValueError("why")
    failed = FleetFailed("the fleet")
    failed.__cause__ = reason
    with pytest.raises(FleetFailed) as raised, one_error():
        raise ExceptionGroup("of a group", [ExceptionGroup("inside", [PeerLost("follows from it")]), failed])
    assert raised.value is failed
    assert raised.value.__cause__ is reason


def test_what_is_chosen_may_be_the_group_itself() -> None:
    with pytest.raises(ExceptionGroup) as raised, one_error(unwrap):
        raise ExceptionGroup("both", [KeyError("one"), KeyError("another")])
    assert len(raised.value.exceptions) == 2


async def test_a_task_that_comes_too_late_leaves_no_coroutine_behind() -> None:
    async def work() -> None:
        raise AssertionError("it must not run")

    late = work()
    async with asyncio.TaskGroup() as tasks:
        pass
    with pytest.raises(RuntimeError, match="finished"):
        start_task(tasks, late, "late")
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED


@pytest.mark.parametrize(("still", "ends"), [(0.5, 10.0), (5.0, 24.0), (3600.0, 3619.0)])
def test_a_timeout_of_a_process_that_stood_still_begins_again(still: float, ends: float) -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_loop.VirtualLoop)
        loop.call_at(9.0, loop.skip, still)
        with pytest.raises(TimeoutError):
            async with running_timeout(10.0):
                await asyncio.Event().wait()
        async with running_timeout(10.0):
            return loop.time()

    assert virtual_loop.run(main()) == pytest.approx(ends)
