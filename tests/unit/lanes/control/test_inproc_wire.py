from itertools import count

import pytest

from asyncrl.errors import PeerLost
from asyncrl.lanes.control.wire import ZERO_COPY_BYTES, InprocWire, WireByScheme
from asyncrl.lanes.control.zmq_wire import ZmqWire
from tests.unit.lanes.control.one_message import receive

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
