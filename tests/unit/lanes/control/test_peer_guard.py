"""Budgets of TCP peers: strangers, descriptors, and bytes that belong to no message that was taken."""

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from asyncrl.errors import PeerLost
from asyncrl.lanes.control import peer_guard
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.peer_guard import PeerGuard
from asyncrl.lanes.control.zmq_wire import ZmqCaller, ZmqListener, ZmqWire

PATIENCE = 60.0
FEW = 256
"""Descriptors of this process in a test."""


@pytest.fixture
async def wire() -> AsyncIterator[ZmqWire]:
    made = ZmqWire(CurveKeys.fresh(), 1 << 20)
    yield made
    made.close()


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """Leaves this process not many more descriptors than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = FEW + max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def guard_of(wire: ZmqWire) -> PeerGuard:
    assert wire._guard is not None
    return wire._guard


def stranger(listener: ZmqListener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(listener.address.partition("#")[0].rpartition(":")[2])), 5.0)


async def answered(listener: ZmqListener, caller: ZmqCaller) -> bool:
    """Returns whether a message of the caller comes, and its answer."""
    got = asyncio.Event()

    def echo(message: tuple[bytes, list[bytes]]) -> None:
        with suppress(PeerLost):  # Messages of one that was cut off are there still.
            listener.offer(*message)

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(listener.pump(echo))
        reading = tasks.create_task(caller.pump(lambda frames: got.set()))
        caller.offer([b"ping"])
        await got.wait()
        serving.cancel()
        reading.cancel()
    return True


def dead(connected: socket.socket) -> bool:
    connected.setblocking(False)
    try:
        return not [*iter(lambda: connected.recv(4096), b"")]
    except BlockingIOError:
        return False
    except OSError:
        return True


async def test_strangers_of_one_address_take_the_places_of_each_other(wire: ZmqWire, few_descriptors: int) -> None:
    listener = wire.listen("tcp://127.0.0.1:*")
    allowed = few_descriptors // peer_guard.SHARE // 2
    friend = wire.connect(listener.address)
    assert await answered(listener, friend)
    with ExitStack() as scope:
        held = []
        for _ in range(4 * allowed):
            held.append(scope.enter_context(stranger(listener)))
            if len(held) > allowed:
                async with asyncio.timeout(PATIENCE):
                    while not await asyncio.to_thread(dead, held[-allowed - 1]):
                        await asyncio.to_thread(os.sched_yield)
        assert not any(map(dead, held[-allowed // 2 :])), "the newest are given their time"
        assert guard_of(wire).cut["too many connections of one address said nothing"] >= 2 * allowed
        assert await answered(listener, friend)
        assert await answered(listener, wire.connect(listener.address)), "a new friend comes in"


async def test_the_last_descriptors_are_for_no_connection(
    wire: ZmqWire, few_descriptors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_guard, "SHARE", 1)
    listener = wire.listen("tcp://127.0.0.1:*")
    assert await answered(listener, wire.connect(listener.address))
    with ExitStack() as scope:
        for _ in range(few_descriptors // 8):  # Most are taken by other things than connections.
            scope.callback(os.close, os.dup(0))
        while int(os.listdir("/proc/self/fd")[-1]) < few_descriptors - few_descriptors // peer_guard.RESERVE:
            scope.callback(os.close, os.dup(0))
        with stranger(listener) as late:
            async with asyncio.timeout(PATIENCE):
                while not await asyncio.to_thread(dead, late):
                    await asyncio.to_thread(os.sched_yield)
        assert guard_of(wire).cut["no descriptors are left for more connections"] == 1
        scope.callback(os.close, os.dup(0))


async def test_what_belongs_to_no_message_that_was_taken_is_bounded(
    wire: ZmqWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener that takes nothing sees what one does whose messages do not end: bytes that nobody takes."""
    monkeypatch.setattr(peer_guard, "SLACK", 0)
    listener = wire.listen("tcp://127.0.0.1:*")
    greedy = wire.connect(listener.address)
    modest = wire.connect(listener.address)
    most = peer_guard.MOST << 20
    ended = asyncio.create_task(greedy.pump(lambda frames: None))
    async with asyncio.timeout(PATIENCE):
        for _ in range(2 * most // 100_000):
            while not ended.done() and not greedy.offer([bytes(100_000)]):
                await greedy.room.wait()
            if ended.done():
                break
        with pytest.raises(PeerLost):
            await ended
    assert guard_of(wire).cut["a message had no end"] == 1
    assert await answered(listener, modest)


async def test_bytes_of_messages_that_are_taken_are_counted_exactly(wire: ZmqWire) -> None:
    """Otherwise a connection of days would drift over its budget, or gain one."""
    listener = wire.listen("tcp://127.0.0.1:*")
    caller = wire.connect(listener.address)
    taken = asyncio.Event()

    def take(message: tuple[bytes, list[bytes]]) -> None:
        if message[1][0] == b"last":
            taken.set()

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(listener.pump(take))
        for number in range(1, 600):
            for frames in ([b"x" * number, b""], [b"y" * (number * 97), b"z"]):
                while not caller.offer(frames):
                    await caller.room.wait()
        caller.offer([b"last"])
        await taken.wait()
        serving.cancel()
    (connection,) = listener._connections.values()
    assert 0 < peer_guard.bytes_received(connection.fd) - connection.taken < 1024, "those of the handshake"


def test_a_descriptor_that_is_none_of_a_peer_by_now_has_no_address(tmp_path: Path) -> None:
    """Between the news of a connection and the look at it the descriptor may be closed, and be something else."""
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(each) for each in socket.socketpair())
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        file = stack.enter_context((tmp_path / "file").open("w"))
        listener.bind(str(tmp_path / "named"))
        listener.listen()
        named = stack.enter_context(socket.socket(socket.AF_UNIX))
        named.connect(str(tmp_path / "named"))
        held = [each.fileno() for each in (ours, theirs, listener, file, named)]
        assert [peer_guard._address(fd) for fd in held] == [""] * 5
    assert peer_guard._address(held[0]) == ""
    assert len(os.listdir("/proc/self/fd")) == before, "copies are closed"
