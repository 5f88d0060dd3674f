"""The ends of both wires: bounded queues, and floods."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from asyncrl.errors import DeadlineExceeded
from asyncrl.lanes.control import wire


async def test_a_peer_that_does_not_read_exhausts_a_deadline_not_the_memory(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SEND_DEADLINE", 0.05)
    listener = site.wire.listen(site.address)
    caller = site.wire.connect(listener.address)
    sent = 0

    async def send_for_ever() -> None:
        nonlocal sent
        while True:
            await caller.send([b"x" * 1000])
            sent += 1

    with pytest.raises(DeadlineExceeded, match=r"has not read for 0\.05 s"):
        await send_for_ever()
    assert sent >= wire.HIGH_WATER
    caller.close()
    listener.close()


async def test_nothing_is_lost_when_a_sender_waits_for_room(site: Any) -> None:
    listener = site.wire.listen(site.address)
    caller = site.wire.connect(listener.address)
    total = 5 * wire.HIGH_WATER

    async def send_there() -> None:
        for number in range(total):
            await caller.send([b"%d" % number, b"x" * 1000])

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(send_there())
        for number in range(total):
            peer, frames = await listener.receive()
            assert frames[0] == b"%d" % number
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        back = tasks.create_task(send_back(listener, peer, total))
        for number in range(total):
            assert (await caller.receive())[0] == b"%d" % number
    assert back.done()
    caller.close()
    listener.close()


async def send_back(listener: Any, peer: bytes, total: int) -> None:
    for number in range(total):
        await listener.send(peer, [b"%d" % number, b"x" * 1000])


async def send_all(caller: wire.Caller, total: int) -> None:
    for _ in range(total):
        await caller.send([b"x" * 64])


async def test_a_flood_lets_other_tasks_run_every_few_messages(site: Any) -> None:
    """Between two turns of another task at most DRAIN_BUDGET messages are taken."""
    listener = site.wire.listen(site.address)
    caller = site.wire.connect(listener.address)
    total, taken, stretch = 60_000, 0, [0]

    async def tick() -> None:
        while taken < total:
            stretch.append(taken)
            await asyncio.sleep(0)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(send_all(caller, total))
        tasks.create_task(tick())
        while taken < total:
            await listener.receive()
            taken += 1
    assert max(after - before for before, after in pairwise(stretch)) <= wire.DRAIN_BUDGET
    caller.close()
    listener.close()


async def test_what_is_poured_lets_the_loop_turn_as_often(site: Any) -> None:
    """Between two turns of the loop, whoever calls for messages: the selector, a sender, or the last pour."""
    listener = site.wire.listen(site.address)
    caller = site.wire.connect(listener.address)
    total, taken, stretch = 20_000, 0, [0]

    def take(message: Any) -> None:
        nonlocal taken
        taken += 1
        peer, _ = message
        listener.offer(peer, [b"an answer"])

    async def tick() -> None:
        while taken < total:
            stretch.append(taken)
            await asyncio.sleep(0)
        pouring.cancel()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        pouring = tasks.create_task(wire.pump_messages(listener, take))
        tasks.create_task(send_all(caller, total))
        tasks.create_task(tick())
    assert max(after - before for before, after in pairwise(stretch)) <= wire.DRAIN_BUDGET
    caller.close()
    listener.close()
