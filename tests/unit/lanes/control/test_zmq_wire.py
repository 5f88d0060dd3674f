import asyncio
import os
import select
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from asyncrl.errors import ConfigError, PeerLost
from asyncrl.lanes.control import zmq_wire
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.wire import CALL_BYTES, DRAIN_BUDGET, HIGH_WATER, LIMIT_BYTES, Caller, Frames
from asyncrl.lanes.control.zmq_wire import PIECE_BYTES, PIECES, ZmqWire, in_pieces, joined
from asyncrl.protocols.messages import Ping
from tests.unit.lanes.control.one_message import receive, sequence

TCP = "tcp://127.0.0.1:*"
WORKER_THAT_DIES = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
peer, *frames = socket.recv_multipart()
socket.send_multipart([peer, *frames])
socket.recv_multipart()
import os; os.kill(os.getpid(), 9)
"""


@pytest.fixture
async def wire() -> AsyncIterator[ZmqWire]:
    wire = ZmqWire(CurveKeys.fresh())
    yield wire
    wire.close()


@pytest.fixture
def socket_folder() -> Iterator[str]:
    """With a short path: a socket's name has 107 bytes at most."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


async def test_tcp_without_keys_is_refused() -> None:
    wire = ZmqWire()
    with pytest.raises(ConfigError, match="CURVE"):
        wire.listen(TCP)
    with pytest.raises(ConfigError, match="CURVE"):
        wire.connect("tcp://127.0.0.1:1")
    wire.close()


async def asked(caller: Caller) -> Frames:
    """The answer to a greeting."""
    assert caller.offer([b"hello"])
    return await receive(caller)


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
@pytest.mark.parametrize("keys", [CurveKeys.fresh(), None])
async def test_other_keys_and_none_get_no_connection(
    wire: ZmqWire, keys: CurveKeys | None, scheme: str, socket_folder: str
) -> None:
    listener = wire.listen(TCP if scheme == "tcp" else f"ipc://{socket_folder}/w")
    stranger = ZmqWire(keys)
    stranger._keys_for = lambda address: keys  # type: ignore[method-assign]
    caller = stranger.connect(listener.address)
    async with asyncio.timeout(60):
        with pytest.raises(PeerLost, match=r"does not accept our keys|broke"):
            await asked(caller)
    stranger.close()
    known = wire.connect(listener.address)
    assert known.offer([b"ours"])
    async with asyncio.timeout(60):
        assert (await receive(listener))[1] == [b"ours"]


async def test_strangers_who_knock_without_end_do_not_keep_the_loop(wire: ZmqWire, socket_folder: str) -> None:
    wire.listen(f"ipc://{socket_folder}/w")
    keeper = wire._authenticator
    assert keeper is not None
    knocks = 10 * DRAIN_BUDGET
    answered = [0]
    steps = [0]
    keeper._loop.remove_reader(keeper._socket.fileno())
    keeper._socket.close(linger=0)
    keeper._socket = Knocking(knocks, answered)
    keeper._answer_all()
    async with asyncio.timeout(60):
        while answered[0] < knocks:
            steps.append(answered[0])
            await asyncio.sleep(0)
    assert max(after - before for before, after in pairwise([*steps, knocks])) <= DRAIN_BUDGET
    keeper._loop.add_reader(keeper._socket.fileno(), keeper._answer_all)


class Knocking:
    """A socket with authentication requests that nobody sent."""

    def __init__(self, knocks: int, answered: list[int]) -> None:
        self._knocks = knocks
        self._answered = answered
        self._reading, self._writing = os.pipe()

    def getsockopt(self, _: int) -> int:
        return zmq.POLLIN if self._answered[0] < self._knocks else 0

    def recv_multipart(self, _: int) -> list[bytes]:
        return [b"1.0", b"1", b"asyncrl", b"", b"", b"PLAIN", b"asyncrl", b"guessed"]

    def send_multipart(self, answer: list[bytes], _: int) -> None:
        assert answer[2] == b"400"
        self._answered[0] += 1

    def fileno(self) -> int:
        return self._reading

    def close(self, linger: int) -> None:
        os.close(self._reading)
        os.close(self._writing)


async def test_one_who_knows_only_the_public_key_is_turned_away_by_the_authenticator(wire: ZmqWire) -> None:
    """It can encrypt for us, for our public key is all that takes, but it holds another key than ours."""
    listener = wire.listen(TCP)
    other = CurveKeys.fresh()
    stranger = ZmqWire(other)
    stranger._keys = HalfKnown(other.public, other.secret, wire._keys.public)
    caller = stranger.connect(listener.address)
    async with asyncio.timeout(60):
        with pytest.raises(PeerLost, match=r"does not accept our keys|broke"):
            await receive(caller)
    assert wire._authenticator is not None
    assert wire._authenticator.refused >= 1
    stranger.close()


class HalfKnown(CurveKeys):
    def __init__(self, public: str, secret: str, server: str) -> None:
        super().__init__(public, secret)
        object.__setattr__(self, "server", server)

    def set_up_caller(self, socket: Any, address: str) -> None:
        super().set_up_caller(socket, address)
        socket.curve_serverkey = self.server.encode()  # type: ignore[attr-defined]


def test_keys_do_not_show_their_secret() -> None:
    keys = CurveKeys.fresh()
    assert keys.secret not in repr(keys)


async def test_a_plain_tcp_stranger_does_not_stop_the_listener(wire: ZmqWire) -> None:
    listener = wire.listen(TCP)
    caller = None
    port = int(listener.address.rsplit(":", 1)[1])
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b""):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(junk)
        writer.close()
    caller = wire.connect(listener.address)
    assert caller.offer([b"hello"])
    async with asyncio.timeout(60):
        assert (await receive(listener))[1] == [b"hello"]


async def test_a_killed_worker_is_noticed_at_once_after_its_last_words(tmp_path: Any) -> None:
    wire = ZmqWire()
    address = f"ipc:///tmp/{tmp_path.name[-20:]}.{id(wire)}"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER_THAT_DIES, address)
    caller = wire.connect(address)
    assert caller.offer([b"a"])
    async with asyncio.timeout(60):
        assert await receive(caller) == [b"a"]
        assert caller.offer([b"b"])
        with pytest.raises(PeerLost, match="broke"):
            await receive(caller)
        assert await process.wait() == -9
    wire.close()


async def test_large_frames_arrive_as_views_and_small_ones_as_bytes(wire: ZmqWire, tmp_path: Any) -> None:
    listener = wire.listen(TCP)
    caller = wire.connect(listener.address)
    large = np.arange(1_000_000)
    assert caller.offer([b"small", large.data.cast("B")])
    async with asyncio.timeout(60):
        _, (small, view) = await receive(listener)
    assert small == b"small"
    assert isinstance(view, memoryview)
    assert np.array_equal(np.frombuffer(view, large.dtype), large)


@pytest.mark.parametrize("address", ["ipc:///" + "x" * 200, "nonsense"])
async def test_an_impossible_address_leaves_no_socket(wire: ZmqWire, address: str) -> None:
    with pytest.raises(PeerLost, match="no address"):
        wire.connect(address)
    with pytest.raises(zmq.ZMQError):
        wire.listen(address)
    assert [end for end in wire._endpoints if not end.closed] == []


async def test_a_send_that_consumes_the_edge_does_not_put_the_receiver_to_sleep(
    wire: ZmqWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.lanes.control.zmq_wire.WATCHDOG_SECONDS", 3600.0)
    listener = wire.listen(TCP)
    caller = wire.connect(listener.address)
    assert caller.offer([b"first"])
    peer, _ = await receive(listener)
    async with asyncio.timeout(60):
        for _ in range(100):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(receive(caller))
                for _ in range(3):
                    await asyncio.sleep(0)
                assert listener.offer(peer, [b"arrives"])
                assert select.select([caller._socket.fileno()], [], [], 5.0)[0]
                assert caller.offer([b"consumes the edge"])


async def test_sockets_are_bounded_and_do_not_linger(wire: ZmqWire) -> None:
    listener = wire.listen(TCP)
    for end in (listener, wire.connect(listener.address)):
        assert end._socket.sndhwm == end._socket.rcvhwm == HIGH_WATER > 0
        assert end._socket.linger == 0
        assert end._socket.maxmsgsize > 0


async def test_a_message_to_a_caller_that_is_gone_is_an_error(wire: ZmqWire) -> None:
    listener = wire.listen(TCP)
    with pytest.raises(PeerLost, match="gone"):
        listener.offer(b"12345", [b"x"])


async def test_closing_the_wire_wakes_who_receives(wire: ZmqWire) -> None:
    listener = wire.listen(TCP)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        receiving = tasks.create_task(receive_until_lost(listener))
        await asyncio.sleep(0)
        wire.close()
    assert "closed here" in receiving.result()


async def receive_until_lost(listener: Any) -> str:
    with pytest.raises(PeerLost) as caught:
        await receive(listener)
    return str(caught.value)


@pytest.mark.parametrize("error", [ValueError("a bug"), PeerLost("of the taker's own")])
async def test_what_a_taker_raises_is_raised_where_it_pours(wire: ZmqWire, error: Exception) -> None:
    listener = wire.listen(TCP)
    caller = wire.connect(listener.address)
    assert caller.offer([b"hello"])

    def refuse(message: Any) -> None:
        raise error

    async with asyncio.timeout(60):
        with pytest.raises(type(error), match=str(error)):
            await listener.pump(refuse)


async def test_pouring_hands_over_what_came_before_and_ends_with_the_end(wire: ZmqWire) -> None:
    listener = wire.listen(TCP)
    caller = wire.connect(listener.address)
    total = 10 * DRAIN_BUDGET
    taken = list[bytes]()

    def take(message: Any) -> None:
        taken.append(bytes(message[1][0]))
        if len(taken) == total:
            listener.close()

    for number in range(total):
        assert caller.offer([b"%d" % number])
    async with asyncio.timeout(60):
        with pytest.raises(PeerLost, match="was closed here"):
            await listener.pump(take)
    assert taken == [b"%d" % number for number in range(total)]


async def test_a_small_message_is_one_frame(wire: ZmqWire) -> None:
    listener = wire.listen(TCP)
    caller = wire.connect(listener.address)
    await sequence(caller).send(Ping(7))
    async with asyncio.timeout(60):
        _, frames = await receive(listener)
    assert len(frames) == 1
    assert sequence(caller).accept(frames) == Ping(7)


async def test_an_edge_that_was_missed_costs_one_period_of_the_watchdog(
    wire: ZmqWire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file descriptor is edge-triggered, and some call may have consumed the edge."""
    monkeypatch.setattr(zmq_wire, "WATCHDOG_SECONDS", 0.05)
    listener = wire.listen(f"ipc://{tmp_path}/w")
    caller = wire.connect(listener.address)
    asyncio.get_running_loop().remove_reader(listener._socket.fileno())
    arrived: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    pumping = asyncio.ensure_future(listener.pump(arrived.set_result))
    await asyncio.sleep(0)
    caller.offer([b"one"])
    async with asyncio.timeout(60):
        assert (await arrived)[1] == [b"one"]
    pumping.cancel()
    caller.close()
    listener.close()


def test_the_sockets_of_one_process_reach_hundreds_of_workers(wire: ZmqWire) -> None:
    assert wire._context.get(zmq.MAX_SOCKETS) >= 3 * 3 * 1000, "three sockets a caller, three callers a worker"


async def test_what_listens_on_ipv6_is_reached_there(wire: ZmqWire) -> None:
    listener = wire.listen("tcp://[::1]:*")
    assert listener.address.startswith("tcp://[::1]:")
    assert wire.connect(listener.address).offer([b"hello"])
    async with asyncio.timeout(60):
        assert (await receive(listener))[1] == [b"hello"]


@pytest.mark.parametrize("sizes", [(CALL_BYTES, CALL_BYTES + 1), (5, 100 << 20, 0), (PIECE_BYTES + 1, 3)])
async def test_a_call_with_long_frames_arrives_whole(sizes: tuple[int, ...], wire: ZmqWire) -> None:
    """A row of a data set of programs has 18 MB of tests."""
    frames = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    listener = wire.listen("tcp://127.0.0.1:*")
    caller = wire.connect(listener.address)
    assert caller.offer(frames)
    async with asyncio.timeout(60):
        assert [bytes(frame) for frame in (await receive(listener))[1]] == frames


def test_pieces_that_are_too_many_or_do_not_fit_are_no_message() -> None:
    message = in_pieces([bytes(PIECE_BYTES + 7), b"ab"])
    assert list(map(len, joined(message, LIMIT_BYTES))) == [PIECE_BYTES + 7, 2]
    for wrong in (message[:-1], [*message, b"more"], [PIECES], [PIECES + b"abc"], [PIECES + b"\xff" * 4, b"a"], []):
        assert joined(list(wrong), LIMIT_BYTES) is not None
        assert joined(list(wrong), LIMIT_BYTES) == wrong
    assert joined(message, PIECE_BYTES) == message, "more than the listener takes"
