import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import pytest

from asyncrl.errors import DeadlineExceeded
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.open_calls import MOST_ANSWERS, Deadline, Deadlines
from asyncrl.lanes.control.server import Dispatch, Server
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.protocols.messages import PROTOCOL, Call, Hello
from asyncrl.simulation import virtual_loop

T = TypeVar("T")


async def wait(deadlines: Deadlines, seconds: float, number: int = 0) -> float:
    """Waits within a deadline; returns when it ended the wait."""
    with (
        pytest.raises(DeadlineExceeded, match=f"not within {seconds}"),
        Deadline(deadlines, number, seconds, lambda: f"not within {seconds}"),
    ):
        await asyncio.sleep(1e6)
    return asyncio.get_running_loop().time()


def test_each_is_reached_in_its_time_unless_it_was_discarded() -> None:
    async def main() -> tuple[list[int], list[float]]:
        deadlines = Deadlines()
        order = list[int]()

        def note(number: int, task: "asyncio.Task[float]") -> None:
            order.append(number)

        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(wait(deadlines, end)) for end in (30.0, 10.0, 20.0, 10.0)]
            for number, task in enumerate(waiting):
                task.add_done_callback(partial(note, number))
            with Deadline(deadlines, 0, 15.0, lambda: "discarded"):
                await asyncio.sleep(5)
            await asyncio.sleep(35)
            waiting.append(tasks.create_task(wait(deadlines, 10.0)))
            waiting[-1].add_done_callback(partial(note, 5))
        return order, [task.result() for task in waiting]

    order, at = virtual_loop.run(main())
    assert order == [1, 3, 2, 0, 5]
    assert at == pytest.approx([30, 10, 20, 10, 50])


def test_progress_lets_every_deadline_run_anew_and_costs_no_timer() -> None:
    """While a queue moves, a call that waits at its end is not late while the others are served."""

    async def main() -> tuple[list[float], int]:
        loop = asyncio.get_running_loop()
        deadlines = Deadlines()
        timers = list[float]()
        call_at = loop.call_at
        loop.call_at = lambda when, *rest, **named: timers.append(when) or call_at(when, *rest, **named)  # type: ignore
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(wait(deadlines, seconds)) for seconds in (10.0, 25.0)]
            await asyncio.sleep(0)
            for _ in range(1000):
                await asyncio.sleep(0.06)
                deadlines.note_progress()
        return [task.result() for task in waiting], len([when for when in timers if when % 1])

    ends, timers = virtual_loop.run(main())
    assert ends == pytest.approx([70.0, 85.0])
    assert timers < 1100


def test_an_answer_extends_the_deadlines_of_its_call_and_of_later_ones() -> None:
    """A call that is stuck is found although the calls behind it are answered."""

    async def main() -> list[float]:
        deadlines = Deadlines()
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(wait(deadlines, 10.0, number)) for number in range(5)]
            for answered in (2, 4, 3, 1):
                await asyncio.sleep(4)
                deadlines.note_answer(answered)
        return [task.result() for task in waiting]

    assert virtual_loop.run(main()) == pytest.approx([10, 10, 14, 26, 26])


def test_the_memory_of_answers_is_bounded_and_hardly_less_precise() -> None:
    async def main() -> None:
        deadlines = Deadlines()
        for number in range(20_000):
            await asyncio.sleep(0.01)
            deadlines.note_answer(number)
            assert len(deadlines._numbers) <= MOST_ANSWERS
            assert deadlines.progress_for(number) == asyncio.get_running_loop().time()
        assert 195 <= deadlines.progress_for(19_500) < 196
        assert 150 <= deadlines.progress_for(15_000) < 175
        assert deadlines.progress_for(-1) == -math.inf

    virtual_loop.run(main())


def test_none_is_reached_after_the_end() -> None:
    async def main() -> None:
        deadlines = Deadlines()
        with Deadline(deadlines, 0, 10.0, lambda: "closed"):
            deadlines.close()
            await asyncio.sleep(20)

    virtual_loop.run(main())


def test_what_a_task_raises_at_its_deadline_gives_way_and_a_cancellation_does_not() -> None:
    async def stubborn(deadlines: Deadlines) -> None:
        with Deadline(deadlines, 0, 10.0, lambda: "overdue"):
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
        loop = asyncio.get_running_loop()
        deadlines = Deadlines()
        timers = list[float]()
        call_at = loop.call_at
        loop.call_at = lambda when, *rest, **named: timers.append(when) or call_at(when, *rest, **named)  # type: ignore
        for number in range(100):
            with Deadline(deadlines, number, 600.0 + number, lambda: ""):
                pass
        deadlines.close()
        return len(timers)

    assert virtual_loop.run(main()) == 1


# ---- deadlines of calls, over a wire ---------------------------------------------------------------------


HELLO = Hello("run1", 0, "controller", 0, "controller-0", PROTOCOL, "0.1")


def over_a_wire(dispatch: Dispatch, calls: Callable[[Client], Awaitable[T]], queued: bool = True, **options: Any) -> T:
    """Returns what `calls` returns with a client of a worker that dispatches like this, on virtual time."""

    async def main() -> T:
        wire = InprocWire()
        server = Server(wire.listen("inproc://worker"), dispatch, HELLO, queued=queued, **options)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve())
            client = Client(wire.connect("inproc://worker"), HELLO, "reward0[0]", queued=queued)
            async with client:
                found = await calls(client)
            serving.cancel()
        return found

    return virtual_loop.run(main())


async def answers_of(client: Client, calls: int, deadline: float) -> list[object]:
    waiting = [asyncio.ensure_future(client.call("score", (), deadline)) for _ in range(calls)]
    return await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize(("queued", "late"), [(True, 0), (False, 15)])
def test_a_call_that_waits_its_turn_is_late_only_where_nothing_is_answered(queued: bool, late: int) -> None:
    """Twenty calls of 100 s each, one after the other, with a deadline of 600 s."""
    turn = asyncio.Semaphore(1)

    async def score(call: Call) -> str:
        async with turn:
            await asyncio.sleep(100.0 if call.call < 20 else 601.0)
        return "scored"

    async def calls(client: Client) -> list[object]:
        found = await answers_of(client, 20, 600.0)
        with pytest.raises(DeadlineExceeded, match=r"reward0\[0\] did not answer score within 600 s|was still running"):
            await client.call("score", (), 600.0)
        return found

    answers = over_a_wire(score, calls, queued)
    assert [isinstance(answer, DeadlineExceeded) for answer in answers].count(True) == late


@pytest.mark.parametrize("told", [True, False])
def test_a_worker_that_makes_progress_with_one_long_call_is_not_late(told: bool) -> None:
    """Eight samples of one call, 100 s each."""
    finished = 0

    async def score(call: Call) -> str:
        nonlocal finished
        for _ in range(8):
            await asyncio.sleep(100.0)
            finished += told
        return "scored"

    (answer,) = over_a_wire(score, lambda client: answers_of(client, 1, 600.0), finished=lambda: finished)
    assert answer == "scored" if told else isinstance(answer, DeadlineExceeded)


def test_progress_is_reported_in_time_for_the_first_call_with_a_short_deadline() -> None:
    """Six parts of a second each; then calls so short that a report lies between each two of them."""
    finished = 0

    async def score(call: Call) -> str:
        nonlocal finished
        for _ in range(int(call.method)):
            await asyncio.sleep(1.0)
            finished += 1
        return "scored"

    async def calls(client: Client) -> list[str]:
        await asyncio.sleep(0.1)
        first = await client.call("6", (), 2.0)
        long = asyncio.ensure_future(client.call("6", (), 2.0))
        for _ in range(40):
            await client.call("0", (), 0.5)
            await asyncio.sleep(0.1)
        return [first, await long]

    assert over_a_wire(score, calls, finished=lambda: finished) == ["scored", "scored"]


def test_a_heartbeat_is_no_progress() -> None:
    async def hang(call: Call) -> None:
        await asyncio.Event().wait()

    async def main(client: Client) -> float:
        with pytest.raises(DeadlineExceeded):
            await client.call("score", (), 600.0)
        return asyncio.get_running_loop().time()

    assert over_a_wire(hang, main, heartbeat=4.0) == pytest.approx(600.0)


@pytest.mark.parametrize("still", [0.5, 20.0, 86400.0])
@pytest.mark.parametrize("answers", [True, False])
def test_a_process_that_stood_still_blames_no_peer(still: float, answers: bool) -> None:
    """The answer came meanwhile, and is read some turns of the loop after the timers are."""

    async def main() -> str:
        loop = asyncio.get_running_loop()
        deadlines = Deadlines()
        answer = asyncio.Event()
        assert isinstance(loop, virtual_loop.VirtualLoop)
        loop.call_at(9.0, loop.skip, still)
        if answers:
            loop.call_at(9.0 + still, loop.after_turns, 9, answer.set)
        with Deadline(deadlines, 0, 10.0, lambda: f"late at {loop.time():g}"):
            await answer.wait()
        return "answered"

    if answers:
        assert virtual_loop.run(main()) == "answered"
    else:
        late = 9.5 + 0.5 if still < 1 else 9.0 + still + 10.0
        with pytest.raises(DeadlineExceeded, match=f"late at {late:g}"):
            virtual_loop.run(main())
