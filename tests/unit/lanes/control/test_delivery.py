"""A link keeps order and number of messages, against peers and queues that would break them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.errors import DeadlineExceeded, PeerLost, Refused
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.open_calls import STREAM_WINDOW
from asyncrl.lanes.control.server import HELLO_BYTES
from asyncrl.protocols.messages import Call, Cancel, Item, More, Reply, Welcome
from tests.unit.lanes.control.conftest import CONTROLLER, WORKER

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


@contextmanager
def full_queue(link: Client) -> Iterator[None]:
    """Lets the queue of a link take nothing during the block."""
    offer = link._sequence._offer
    link._sequence._offer = lambda frames: False
    yield
    link._sequence._offer = offer


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Welcome(WORKER.instance, 5), "an unexpected Welcome"),
        (Reply(5, None), "call 5, which was never made"),
        (Call(0, "echo", (), float("inf")), "has the deadline"),
        (Call(0, "echo", (), float("nan")), "has the deadline"),
        (Call(0, "echo", (), 0.0), "has the deadline"),
    ],
)
async def test_a_message_that_nobody_sends_ends_the_link(site: Any, message: Any, says: str) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        (session,) = worker.server._sessions.values()
        sender = link._sequence if isinstance(message, Call) else session.sequence
        sender.offer(message)
        await link.lost.wait()
        assert says in link.reason


async def test_a_welcome_without_credit_is_no_welcome(site: Any) -> None:
    async with site.serving(credit=0) as worker:
        with pytest.raises(PeerLost, match="an unexpected Welcome"):
            async with site.link(worker):
                pass


async def test_a_caller_that_takes_more_credit_than_it_got_is_ended(site: Any) -> None:
    async with site.serving(credit=2) as worker, site.link(worker) as link, asyncio.TaskGroup() as tasks:
        link._credit.give(10)
        calls = [tasks.create_task(_reason_of_end(link)) for _ in range(5)]
        assert all("4 calls are running, 2 are allowed" in reason for reason in await asyncio.gather(*calls))


async def _reason_of_end(link: Client) -> str:
    with pytest.raises(PeerLost) as lost:
        await link.call("hang", (), 60.0)
    return str(lost.value)


async def test_a_call_that_comes_twice_under_one_number_ends_the_link(site: Any, eventually: Eventually) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        waiting = asyncio.ensure_future(link.call("hang", (), 60.0))
        await eventually(lambda: worker.server.running == 1)
        link._sequence.offer(Call(0, "echo", (), 5.0))
        with pytest.raises(PeerLost, match="call 0 came twice"):
            await waiting
        assert [call.method for call in worker.calls] == ["hang"]


async def test_a_late_answer_is_no_answer_to_another_call(site: Any) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        (session,) = worker.server._sessions.values()
        with pytest.raises(DeadlineExceeded):
            await link.call("hang", (), 0.02)
        waiting = asyncio.ensure_future(link.call("hang", (), 60.0))
        session.sequence.offer(Reply(0, "late"))
        assert await link.call("echo", (1,), 5.0) == (1,), "an answer that comes after the late one"
        assert link.late_replies >= 1
        assert not waiting.done()
        waiting.cancel()


async def test_a_cancel_that_found_no_room_is_sent_before_the_next_call(site: Any, eventually: Eventually) -> None:
    async with site.serving(credit=1) as worker, site.link(worker) as link:
        waiting = asyncio.ensure_future(link.call("hang", (), 60.0))
        await eventually(lambda: worker.server.running == 1)
        with full_queue(link):
            waiting.cancel()
            await asyncio.wait([waiting])
        assert worker.cancelled == []
        assert await link.call("echo", (1,), 5.0) == (1,), "its credit came back"
        assert worker.cancelled == ["hang"]


async def test_nothing_overtakes_a_message_that_waits_for_room(site: Any, eventually: Eventually) -> None:
    """A cancel that came before its call would cancel nothing."""
    async with site.serving() as worker, site.link(worker) as link:
        with full_queue(link):
            waiting = asyncio.ensure_future(link.call("echo", (1,), 5.0))
            await eventually(link._sequence._order.locked)
        assert not link._sequence.offer(Cancel(0)), "the queue has room, and a call waits for it"
        link.caller.room.wake()
        assert await waiting == (1,)
        assert link._sequence.offer(Cancel(0))


async def test_items_that_were_not_granted_end_the_link(site: Any, eventually: Eventually) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        async with aclosing(link.stream("hang_after_one", (), 60.0)) as items:
            assert await anext(items) == 1
            (session,) = worker.server._sessions.values()
            for item in range(STREAM_WINDOW + 1):
                assert session.sequence.offer(Item(0, item))
            await link.lost.wait()
        assert f"more than {STREAM_WINDOW} items of a stream came without being granted" in link.reason


async def test_a_consumer_that_grants_more_than_it_took_is_ended(site: Any) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        async with aclosing(link.stream("hang_after_one", (), 60.0)) as items:
            assert await anext(items) == 1
            link._sequence.offer(More(0, STREAM_WINDOW + 1))
            await link.lost.wait()
        assert "more items of a stream were granted" in link.reason


async def test_a_hello_that_is_too_long_is_refused_before_it_is_read(site: Any) -> None:
    async with site.serving() as worker:
        with pytest.raises(Refused, match="expected a hello: "):
            async with site.link(worker, replace(CONTROLLER, service="x" * HELLO_BYTES)):
                pass
        assert worker.server.refused == 1
