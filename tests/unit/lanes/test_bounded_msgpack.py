"""Objects in a decoded message are bounded, not only its bytes."""

import tracemalloc

import msgpack
import pytest

from asyncrl.errors import WireError
from asyncrl.lanes.bounded_msgpack import COUNTED_BYTES, unpacked
from asyncrl.lanes.control.message_codec import decode

MIB = 2**20
LISTS = b"\x90"
TABLES = b"\x80"
NESTED = b"\x91"


def bomb(item: bytes, size: int) -> bytes:
    count = size // len(item)
    return b"\xdd" + count.to_bytes(4, "big") + item * count


@pytest.mark.parametrize(
    "item", [LISTS, TABLES, b"\x91\x90", b"\x92\x01\x80", b"\xdc\x00\x00", b"\x81\xa1a\x90"], ids=repr
)
def test_empty_lists_do_not_fill_memory(item: bytes) -> None:
    body = bomb(bomb(item, MIB // 2), 8 * MIB)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"more than|exceeds"):
        unpacked(body, 2**16, 2**20, strict_map_key=False)
    with pytest.raises(WireError, match="no MessagePack"):
        decode([bomb(item, 24 * MIB)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 400 * MIB


def test_many_items_and_declared_lengths_are_refused() -> None:
    for body in (bomb(b"\xa2ab", 8 * MIB), b"\xdd\x7f\xff\xff\xff" * 400 + bytes(MIB), bomb(bomb(b"\x01", 9), 8 * MIB)):
        with pytest.raises((ValueError, msgpack.UnpackException)):
            unpacked(body, 2**16, 2**20)


def test_what_fits_is_decoded() -> None:
    value = [[index, {"text": "é" * 40}] for index in range(20_000)]
    body = msgpack.packb(value)
    assert len(body) > COUNTED_BYTES
    assert unpacked(body, 40_001, 100_000) == value
    with pytest.raises(ValueError, match="more than 40000 lists"):
        unpacked(body, 40_000, 100_000)
