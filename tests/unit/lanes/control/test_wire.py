"""The ends of both wires: bounded queues, and floods."""

import asyncio
from itertools import count, pairwise
from typing import Any

import pytest

from asyncrl.errors import DeadlineExceeded, PeerLost
from asyncrl.lanes.control import message_codec, wire
from asyncrl.lanes.control.message_codec import MessageSequence
from asyncrl.lanes.control.wire import ZERO_COPY_BYTES, InprocWire, WireByScheme
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.protocols.messages import Item
from tests.unit.lanes.control.one_message import receive, sequence


async def test_a_peer_that_does_not_read_exhausts_a_deadline_not_the_memory(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_codec, "SEND_DEADLINE", 0.05)
    listener = site.wire.listen(site.address)
    caller = site.wire.connect(listener.address)
    messages = sequence(caller)

    async def send_for_ever() -> None:
        while True:
            await messages.send(Item(0, b"x" * 1000))

    with pytest.raises(DeadlineExceeded, match=r"has not read for 0\.05 s"):
        await send_for_ever()
    assert messages.sent >= wire.HIGH_WATER
    caller.close()
    listener.close()


async def send_all(messages: MessageSequence, total: int, size: int) -> None:
    for number in range(total):
        await messages.send(Item(number, b"x" * size))


async def test_nothing_is_lost_when_a_sender_waits_for_room(site: Any) -> None:
    """The numbers of the messages, which `accept` checks, say so."""
    listener = site.wire.listen(site.address)
    caller = site.wire.connect(listener.address)
    total = 2 * wire.HIGH_WATER
    there = sequence(caller)
    peers: list[bytes] = []
    all_there = asyncio.Event()
    all_back = asyncio.Event()

    def take(message: tuple[bytes, Any]) -> None:
        peers.append(message[0])
        there.accept(message[1])
        if there.received == total:
            all_there.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        pumping = tasks.create_task(listener.pump(take))
        await send_all(there, total, 1000)
        await all_there.wait()
        pumping.cancel()
    back = MessageSequence(lambda frames: listener.offer(peers[0], frames), listener.room, "caller")

    def take_back(frames: Any) -> None:
        back.accept(frames)
        if back.received == total:
            all_back.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        pumping = tasks.create_task(caller.pump(take_back))
        await send_all(back, total, 1000)
        await all_back.wait()
        pumping.cancel()
    caller.close()
    listener.close()


async def test_a_flood_lets_the_loop_turn_every_few_messages(site: Any) -> None:
    """Between two turns of the loop, whoever calls for messages: the selector, a sender, or the last pass."""
    listener = site.wire.listen(site.address)
    caller = site.wire.connect(listener.address)
    total = 4_000
    taken = 0
    stretch = [0]

    def take(message: Any) -> None:
        nonlocal taken
        taken += 1
        peer, _ = message
        listener.offer(peer, [b"an answer"])

    async def tick() -> None:
        while taken < total:
            stretch.append(taken)
            await asyncio.sleep(0)
        pumping.cancel()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        pumping = tasks.create_task(listener.pump(take))
        tasks.create_task(send_all(sequence(caller), total, 64))
        tasks.create_task(tick())
    assert max(after - before for before, after in pairwise(stretch)) <= wire.DRAIN_BUDGET
    caller.close()
    listener.close()


ADDRESS = "inproc://a"


async def test_a_caller_may_come_before_the_listener() -> None:
    wire = InprocWire()
    caller = wire.connect(ADDRESS)
    assert caller.offer([b"early"])
    peer, frames = await receive(wire.listen(ADDRESS))
    assert frames == [b"early"]
    assert len(peer) == 5


async def test_two_listeners_at_one_address_are_refused() -> None:
    wire = InprocWire()
    wire.listen(ADDRESS)
    with pytest.raises(OSError, match="already in use"):
        wire.listen(ADDRESS)


async def test_a_severed_end_delivers_what_was_sent_and_then_is_gone() -> None:
    wire = InprocWire()
    listener = wire.listen(ADDRESS)
    caller = wire.connect(ADDRESS)
    assert caller.offer([b"x"])
    peer, _ = await receive(listener)
    assert listener.offer(peer, [b"last words"])
    wire.sever(ADDRESS)
    assert await receive(caller) == [b"last words"]
    with pytest.raises(PeerLost):
        await receive(caller)
    with pytest.raises(PeerLost):
        caller.offer([b"x"])
    assert wire.listen(ADDRESS) is not listener


async def test_small_frames_are_copied_and_large_ones_shared() -> None:
    wire = InprocWire()
    listener = wire.listen(ADDRESS)
    caller = wire.connect(ADDRESS)
    small = bytearray(ZERO_COPY_BYTES - 1)
    large = bytearray(ZERO_COPY_BYTES)
    assert caller.offer([memoryview(small), memoryview(large)])
    small[0] = large[0] = 1
    _, frames = await receive(listener)
    assert [frame[0] for frame in frames] == [0, 1]


async def test_a_caller_that_left_is_gone_for_the_listener() -> None:
    wire = InprocWire()
    listener = wire.listen(ADDRESS)
    caller = wire.connect(ADDRESS)
    assert caller.offer([b"x"])
    peer, _ = await receive(listener)
    caller.close()
    with pytest.raises(PeerLost, match="gone"):
        listener.offer(peer, [b"y"])
    for _ in zip(range(10), count(), strict=False):
        wire.connect(ADDRESS).close()
    assert len(listener._callers) <= 1


async def test_the_scheme_chooses_the_wire() -> None:
    inproc = InprocWire()
    network = ZmqWire()
    wires = WireByScheme(inproc, network)
    assert wires.listen(ADDRESS) is inproc._listeners[ADDRESS]
    caller = wires.connect("ipc:///tmp/nobody-there")
    assert network._endpoints == [caller]
    caller.close()
    wires.close()
