"""Links over both wires: what a caller sees."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import DeadlineExceeded, LostRows, PeerLost, Refused, RemoteError, WireError
from asyncrl.lanes.control.client import Credit, error_from, failure_from
from asyncrl.lanes.control.open_calls import STREAM_WINDOW
from asyncrl.protocols.messages import PROTOCOL, Call, Hello, Reply
from asyncrl.simulation import virtual_loop
from tests.instruction_count import counting

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]
EVERY_WIRE = pytest.mark.parametrize("site", ["inproc", "ipc", "tcp"], indirect=True)
CONTROLLER_HELLO: dict[str, Any] = {"run": "other", "incarnation": 2, "protocol": 99}


@EVERY_WIRE
async def test_a_call_returns_what_the_worker_answers_and_a_stream_yields_its_items_in_order(site: Any) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        array = np.arange(100_000)
        number, text, same = await link.call("echo", (1, "two", array), 5.0)
        assert (number, text) == (1, "two")
        assert np.array_equal(same, array)
        assert [item async for item in link.stream("count", (1000,), 5.0)] == list(range(1000))
        assert await link.call("echo", (), 5.0) == ()


async def test_calls_are_answered_while_another_one_runs(site: Any, eventually: Eventually) -> None:
    async with site.serving() as worker, site.link(worker) as link, asyncio.TaskGroup() as tasks:
        hanging = tasks.create_task(link.call("hang", (), 60.0))
        await worker.started.wait()
        assert await link.call("echo", (1,), 5.0) == (1,)
        hanging.cancel()
        await eventually(lambda: worker.cancelled == ["hang"] and worker.server.running == 0)


async def test_the_deadline_names_method_peer_and_seconds_and_ends_the_call_there(
    site: Any, eventually: Eventually
) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        with pytest.raises(DeadlineExceeded, match=r"generation0\[1\] did not answer hang within 0.05 s"):
            await link.call("hang", (), 0.05)
        await eventually(lambda: worker.cancelled == ["hang"] and worker.server.running == 0)


async def test_a_call_whose_deadline_has_passed_already_fails_alone(site: Any) -> None:
    """The second try of a call may come that late; the worker would take such a deadline for strange bytes."""
    async with site.serving() as worker, site.link(worker) as link, asyncio.TaskGroup() as tasks:
        hanging = tasks.create_task(link.call("hang", (), 60.0))
        await worker.started.wait()
        for seconds in (0.0, -1.5):
            with pytest.raises(DeadlineExceeded, match=r"generation0\[1\] was not called: the deadline of echo"):
                await link.call("echo", (), seconds)
            with pytest.raises(DeadlineExceeded, match=r"generation0\[1\] was not called: the deadline of count"):
                await anext(link.stream("count", (3,), seconds))
        assert await link.call("echo", (1,), 5.0) == (1,)
        assert [call.method for call in worker.calls] == ["hang", "echo"]
        hanging.cancel()


async def test_closing_a_stream_cancels_the_call(site: Any, eventually: Eventually) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        async with aclosing(link.stream("count", (10_000_000,), 5.0)) as items:
            async for item in items:
                if item == 3:
                    break
        await eventually(lambda: "count closed" in worker.cancelled and worker.server.running == 0)


async def test_a_stream_runs_at_most_a_window_ahead_of_its_consumer(site: Any) -> None:
    async with (
        site.serving() as worker,
        site.link(worker) as link,
        aclosing(link.stream("count", (10_000,), 5.0)) as items,
    ):
        for consumed in range(3 * STREAM_WINDOW):
            assert await anext(items) == consumed
            await link.call("echo", (), 5.0)
            assert worker.produced <= consumed + 1 + STREAM_WINDOW + 1


async def test_a_deadline_is_that_of_the_next_item_of_a_stream(site: Any) -> None:
    """A long stream is no late one, and one that stops in the middle is."""

    async def stops(items: int) -> AsyncIterator[int]:
        for item in range(items):
            yield item
        await asyncio.Event().wait()

    async with site.serving() as worker, site.link(worker) as link:
        worker.count = stops
        items: list[int] = []
        with pytest.raises(DeadlineExceeded, match=r"did not answer count within 0.3 s|count was still running"):
            await collect(link.stream("count", (300,), 0.3), items)
        assert items == list(range(300))


async def collect(stream: AsyncIterator[int], items: list[int]) -> None:
    async for item in stream:
        items.append(item)


async def raising(error: BaseException) -> None:
    raise error


async def failing_after_two(error: BaseException) -> Any:
    yield 1
    yield 2
    raise error


@EVERY_WIRE
async def test_an_error_of_ours_arrives_as_its_own_class_with_the_remote_one_as_cause(site: Any) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        worker.echo = lambda: raising(LostRows("slot 3 is gone"))
        with pytest.raises(LostRows, match=r"generation0\[1\]: slot 3 is gone") as caught:
            await link.call("echo", (), 5.0)
        cause = caught.value.__cause__
        assert isinstance(cause, RemoteError)
        assert (cause.kind, cause.service, cause.rank) == ("LostRows", "generation0", 1)
        assert "raise error" in cause.remote_traceback


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ZeroDivisionError("by \ud800"), RemoteError, r"generation0\[1\] raised ZeroDivisionError: by \?"),
        (RemoteError("KeyError", "x", "reward", 0, ""), RemoteError, r"reward\[0\] raised KeyError: x"),
        (ExceptionGroup("outer", [ExceptionGroup("inner", [LostRows("gone")])]), LostRows, "gone"),
        (asyncio.CancelledError(), RemoteError, "CancelledError"),
    ],
    ids=["another error", "over a second hop", "alone in its group", "cancelled within the worker"],
)
async def test_errors_of_a_worker_arrive(site: Any, error: BaseException, kind: type[Exception], says: str) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        worker.echo = lambda: raising(error)
        with pytest.raises(kind, match=says):
            await link.call("echo", (), 5.0)
        with pytest.raises(RemoteError, match="AttributeError"):
            await link.call("no_such_method", (), 5.0)


@pytest.mark.parametrize(
    ("service", "rank", "instance", "named"),
    [
        ("generation", 0, "generation1.0-0-feedbeef", "generation1[0]"),
        ("training", 3, "training0.3-2-feedbeef", "training0[3]"),
        ("cost_critic", 0, "cost_critic12.0-0-feedbeef", "cost_critic12[0]"),
        ("controller", 0, "controller-0-feedbeef", "controller[0]"),
    ],
)
def test_errors_name_replica_and_rank(service: str, rank: int, instance: str, named: str) -> None:
    worker = Hello("run", 0, service, rank, instance, PROTOCOL, "0.1.0")
    remote = error_from(failure_from(ZeroDivisionError("by 0"), 0, worker))
    assert str(remote) == f"{named} raised ZeroDivisionError: by 0"
    own = error_from(failure_from(LostRows("slot 3 is gone"), 0, worker))
    assert str(own) == f"{named}: slot 3 is gone"


async def test_an_error_in_a_stream_comes_after_its_items(site: Any) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        worker.echo = lambda: failing_after_two(LostRows("gone"))
        items: list[int] = []
        with pytest.raises(LostRows):
            await collect(link.stream("echo", (), 5.0), items)
        assert items == [1, 2]


async def test_what_may_not_travel_fails_that_call_only(site: Any) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        worker.hang = lambda: asyncio.sleep(0, object())
        with pytest.raises(WireError, match=r"builtins\.object"):
            await link.call("echo", (object(),), 5.0)
        with pytest.raises(WireError, match=r"generation0\[1\].*builtins\.object"):
            await link.call("hang", (), 5.0)
        assert await link.call("echo", (1,), 5.0) == (1,)


@pytest.mark.parametrize("field", ["run", "incarnation", "protocol"])
async def test_a_stranger_is_refused_with_both_sides_named(site: Any, field: str) -> None:
    async with site.serving() as worker, site.link(worker) as known:
        stranger = replace(known.hello, **{field: CONTROLLER_HELLO[field]})
        with pytest.raises(Refused, match=f"refuses controller.*{CONTROLLER_HELLO[field]}.*another {field}"):
            async with site.link(worker, stranger):
                pass
        assert await known.call("echo", (), 5.0) == ()


async def test_another_instance_than_the_expected_one_is_a_lost_peer(site: Any) -> None:
    async with site.serving() as worker:
        with pytest.raises(PeerLost, match=r"generation0\.1-3-a answers in place of generation0\.1-3-b"):
            async with site.link(worker, instance="generation0.1-3-b"):
                pass


async def test_nobody_there_is_an_exceeded_deadline(site: Any) -> None:
    link = site.link(site)
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(DeadlineExceeded, match=r"hello within 0\.05 s"):
            await link.open(tasks, deadline=0.05)
        link.close()


async def outstanding(site: Any, link: Any, worker: Any, eventually: Eventually, lose: Callable[[], Any]) -> list[str]:
    """Loses the peer while two calls and a stream wait for it; returns what each of them raised."""

    async def consume() -> None:
        async for _ in link.stream("hang", (), 60.0):
            pass

    async def reason(call: Any) -> str:
        with pytest.raises(PeerLost) as caught:
            await call
        return str(caught.value)

    calls = [link.call("hang", (), 60.0), link.call("hang", (), 60.0), consume()]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(reason(call)) for call in calls]
        await eventually(lambda: len(worker.calls) == 3)
        lose()
    return [task.result() for task in waiting]


async def test_items_of_a_lost_peer_are_not_delivered_late(site: Any, eventually: Eventually) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        items = link.stream("count", (10,), 5.0)
        assert await anext(items) == 0
        await eventually(lambda: link._sequence.received == 12)
        link.fail("killed")
        with pytest.raises(PeerLost, match="killed"):
            await anext(items)


def kill(worker: Any, link: Any) -> None:
    link.fail("its process was killed (-9)")


def close_listener(worker: Any, link: Any) -> None:
    worker.server.listener.close()


def skip_a_number_of_the_worker(worker: Any, link: Any) -> None:
    (session,) = worker.server._sessions.values()
    session.sequence.sent += 1
    session.sequence.offer(Reply(0, None))


def skip_a_number_of_the_caller(worker: Any, link: Any) -> None:
    link._sequence.sent += 1
    link._sequence.offer(Call(3, "echo", (), 1.0))


@pytest.mark.parametrize(
    ("lose", "says"),
    [
        (kill, "generation0[1]: its process was killed (-9)"),
        (close_listener, ""),
        (skip_a_number_of_the_worker, "a gap: message 2 came where 1 was next"),
        (skip_a_number_of_the_caller, "closes the connection: a gap: message 5 came where 4 was next"),
    ],
)
async def test_a_lost_peer_fails_every_outstanding_call(
    site: Any, eventually: Eventually, lose: Callable[[Any, Any], None], says: str
) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        reasons = await outstanding(site, link, worker, eventually, lambda: lose(worker, link))
        assert len(set(reasons)) == 1
        assert says in reasons[0]
        assert link.lost.is_set()
        with pytest.raises(PeerLost):
            await link.call("echo", (), 5.0)
        if lose is skip_a_number_of_the_caller:
            await eventually(lambda: worker.server.running == 0)


async def test_silent_peers_are_lost_after_three_heartbeats(site: Any, eventually: Eventually) -> None:
    async with site.serving() as worker, site.link(worker, heartbeat=0.02) as link:
        await eventually(lambda: worker.server._sessions != {})
        asked = asyncio.get_running_loop().time()
        assert await link.call("echo", (), 5.0) == ()
        worker.server._take = lambda *_: None
        async with asyncio.timeout(60):
            await link.lost.wait()
        assert "no sign of life for 3 heartbeats" in link.reason
        assert link.silence is not None
        assert link.silence.heartbeats == 3
        assert link.silence.since > asked, "the answer was a sign of life"


async def test_pings_keep_both_ends_alive(site: Any, eventually: Eventually) -> None:
    async with site.serving(heartbeat=0.05) as worker, site.link(worker, heartbeat=0.01) as link:
        (session,) = worker.server._sessions.values()
        await eventually(lambda: session.sequence.received > 20)
        assert not link.lost.is_set()
        assert worker.server._sessions


async def test_calls_of_a_silent_caller_are_cancelled(site: Any, eventually: Eventually) -> None:
    async with site.serving(heartbeat=0.02) as worker, site.link(worker) as link, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(link.call("hang", (), 60.0))
        await eventually(lambda: worker.cancelled == ["hang"])
        waiting.cancel()


async def test_more_calls_than_the_credit_wait_for_their_turn(site: Any, eventually: Eventually) -> None:
    async with site.serving(credit=2) as worker, site.link(worker) as link, asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(link.call("hang", (), 60.0)) for _ in range(2)]
        await eventually(lambda: worker.server.running == 2)
        with pytest.raises(DeadlineExceeded, match="echo"):
            await link.call("echo", (), 0.02)
        third = tasks.create_task(link.call("echo", (3,), 60.0))
        calls[0].cancel()
        assert await third == (3,)
        assert max(len(worker.calls), 0) == 3
        calls[1].cancel()


async def test_an_answer_that_crosses_its_cancel_is_counted(site: Any, eventually: Eventually) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        (session,) = worker.server._sessions.values()
        with pytest.raises(DeadlineExceeded):
            await link.call("hang", (), 0.02)
        session.sequence.offer(Reply(0, None))
        await eventually(lambda: link.late_replies >= 1)
        assert await link.call("echo", (1,), 5.0) == (1,)


# Credit of a connection: first come, first served, at a cost that does not grow with the calls that wait.


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
