"""Named memory of this process, in place of shared memory, for fleets that run in one process."""

import mmap
from dataclasses import dataclass
from typing import Final

from asyncrl.errors import PeerLost

SCHEME: Final = "inproc://"
_blocks: dict[str, mmap.mmap] = {}


@dataclass(frozen=True, slots=True)
class ProcessBlock:
    """Memory of this process. owner: whether it was created here."""

    address: str
    buffer: memoryview
    owner: bool

    def close(self) -> None:
        if self.owner:
            _blocks.pop(self.address, None)


def create(name: str, size: int) -> ProcessBlock:
    """Makes a block."""
    address = SCHEME + name
    assert address not in _blocks, f"weight arena {address} exists already"
    _blocks[address] = mmap.mmap(-1, size)  # page-aligned like shared memory: the same vector loads, the same bits
    return ProcessBlock(address, memoryview(_blocks[address]), owner=True)


def attach(address: str) -> ProcessBlock:
    """Returns a read-only view of a block. Raises PeerLost when its owner is gone."""
    if address not in _blocks:
        raise PeerLost(f"weight arena {address} is gone: its trainer has ended")
    return ProcessBlock(address, memoryview(_blocks[address]).toreadonly(), owner=False)
