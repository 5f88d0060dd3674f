"""Process memory under a name: the twin of shared memory for fleets that run in one process."""

import mmap
from dataclasses import dataclass
from typing import Final

from asyncrl.errors import PeerLost

SCHEME: Final = "inproc://"
_blocks: dict[str, mmap.mmap] = {}


@dataclass(frozen=True, slots=True)
class Block:
    address: str
    buffer: memoryview
    owner: bool

    def close(self) -> None:
        if self.owner:
            _blocks.pop(self.address, None)


def create(name: str, size: int) -> Block:
    address = SCHEME + name
    assert address not in _blocks, f"weight arena {address} exists already"
    _blocks[address] = mmap.mmap(-1, size)  # page-aligned like shared memory: the same vector loads, the same bits
    return Block(address, memoryview(_blocks[address]), owner=True)


def attach(address: str) -> Block:
    """Raises PeerLost when the arena's owner is gone."""
    if address not in _blocks:
        raise PeerLost(f"weight arena {address} is gone: its trainer has ended")
    return Block(address, memoryview(_blocks[address]).toreadonly(), owner=False)
