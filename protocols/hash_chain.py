"""The chain that controller and trainer compute separately over what was trained.

h_v = SHA-256(h_{v-1}, the sorted (group, member, attempt) of iteration v). The trainer takes the keys of the rows that
entered the loss of an update that it took, the journal those that it recorded; equal chains mean equal histories.
"""

import struct
from collections.abc import Iterable
from hashlib import sha256

_KEY = struct.Struct(">qqq")

GENESIS = bytes(32)
"""The chain before the first iteration."""


def chain(previous: bytes, keys: Iterable[tuple[int, int, int]]) -> bytes:
    """Returns the next link, 32 bytes, after an iteration over these (group, member, attempt), given in any order."""
    packed = [_KEY.pack(*key) for key in sorted(keys)]
    return sha256(previous + b"".join(packed)).digest()
