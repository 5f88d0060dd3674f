"""The server over both wires: unknown peers, broken callers, and how many of them."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest

from asyncrl.errors import PeerLost
from asyncrl.lanes.control.message_codec import encode
from asyncrl.lanes.control.server import FIRST_SWEEP, THREADED_BYTES, CallerSession
from asyncrl.protocols.messages import Call, Ping

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


async def test_garbage_from_strangers_leaves_the_others_alone(site: Any, eventually: Eventually) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        stranger = site.wire.connect(worker.address)
        junk: list[list[bytes]] = [[b""], [b"x" * 8], [b"\0" * 8, b"\xdd\xff\xff\xff\xff"], [b"\0" * 8, b"x" * 100_000]]
        junk.append([b"\0" * 8, *map(bytes, encode(Call(0, "echo", (), 1.0)))])
        for frames in junk:
            assert stranger.offer(frames)
        await eventually(lambda: worker.server.refused == len(junk))
        assert await link.call("echo", (1,), 5.0) == (1,)
        assert worker.server.running == 0
        stranger.close()


@pytest.mark.parametrize(
    ("junk", "says"), [(b"junk", "a message without a number"), (b"junk" * THREADED_BYTES, "a gap")]
)
async def test_garbage_from_a_known_caller_ends_its_link_only(site: Any, junk: bytes, says: str) -> None:
    async with site.serving() as worker, site.link(worker) as link, site.link(worker) as other:
        assert link.caller.offer([junk])
        await link.lost.wait()
        assert f"closes the connection: {says}" in link.reason
        assert await other.call("echo", (1,), 5.0) == (1,)


async def test_a_call_that_wants_no_answer_ends_without_its_value(site: Any) -> None:
    async with site.serving() as worker, site.link(worker) as link:
        assert await link.call("echo", (1,), 5.0, wants_answer=False) is None
        assert await link.call("echo", (1,), 5.0) == (1,)


def is_gone(session: CallerSession) -> bool:
    """Returns whether the server's socket has noticed that the caller hung up, which takes it a while over ipc."""
    try:
        session.sequence.offer(Ping(0))
    except PeerLost:
        return True
    return False


async def test_callers_are_not_counted_out_and_those_that_are_gone_are_forgotten(
    site: Any, eventually: Eventually
) -> None:
    async with site.serving() as worker, AsyncExitStack() as scope:
        links = [await scope.enter_async_context(site.link(worker)) for _ in range(2 * FIRST_SWEEP)]
        assert worker.server.callers == len(links)
        for _ in range(8 * FIRST_SWEEP):
            async with site.link(worker):
                *_, newest = worker.server._sessions.values()
            await eventually(partial(is_gone, newest))
        assert worker.server.callers <= 4 * FIRST_SWEEP
        assert [await link.call("echo", (1,), 5.0) for link in links] == [(1,)] * len(links)


async def test_others_are_answered_while_a_large_call_is_decoded_and_its_caller_is_answered_in_order(site: Any) -> None:
    held = threading.Event()
    executor = ThreadPoolExecutor(1)
    executor.submit(held.wait)
    asyncio.get_running_loop().set_default_executor(executor)
    large = tuple(f"{number:08d}" for number in range(THREADED_BYTES // 8))
    async with site.serving() as worker, site.link(worker) as link, site.link(worker) as other:
        first, second = (asyncio.ensure_future(link.call("echo", args, 5.0)) for args in (large, (2,)))
        try:
            for _ in range(64):
                assert await other.call("echo", (1,), 5.0) == (1,)
            assert not first.done(), "it waits for the thread"
            assert not second.done(), "calls of one connection are taken in order"
        finally:
            held.set()
        assert (await first, await second) == (large, (2,))
