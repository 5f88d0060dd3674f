"""The memory of an arena, which its trainer writes and engines read without a copy: named shared memory, or memory of
this process for fleets that run in one process."""

import mmap
from dataclasses import dataclass
from typing import Self

from asyncrl.errors import PeerLost
from asyncrl.lanes.shared_memory import Segment

SHARED_SCHEME, PROCESS_SCHEME = "shm://", "inproc://"
_process_maps: dict[str, mmap.mmap] = {}


@dataclass(frozen=True, slots=True)
class ArenaMemory:
    """Bytes that both sides map. address: what `attach` takes, e.g. `shm://NAME`. owner: whether it was made here."""

    address: str
    mapped: Segment | mmap.mmap
    owner: bool

    @classmethod
    def create(cls, name: str, size: int, wire: str) -> Self:
        """wire: "inproc" for memory of this process. Raises ArenaFull when shared memory is too small."""
        if wire != "inproc":
            return cls(SHARED_SCHEME + name, Segment.create(name, size), owner=True)
        address = PROCESS_SCHEME + name
        assert address not in _process_maps, f"weight arena {address} exists already"
        _process_maps[address] = mmap.mmap(-1, size)  # page-aligned like shared memory: the same vector loads and bits
        return cls(address, _process_maps[address], owner=True)

    @classmethod
    def attach(cls, address: str) -> Self:
        """Raises PeerLost when its owner is gone."""
        try:
            if address.startswith(PROCESS_SCHEME):
                return cls(address, _process_maps[address], owner=False)
            return cls(address, Segment.open(address.removeprefix(SHARED_SCHEME)), owner=False)
        except (KeyError, FileNotFoundError) as gone:
            raise PeerLost(f"weight arena {address} is gone: its trainer has ended") from gone

    @property
    def buffer(self) -> memoryview:
        """Writable for the owner only."""
        if isinstance(self.mapped, Segment):
            return self.mapped.buffer
        return memoryview(self.mapped) if self.owner else memoryview(self.mapped).toreadonly()

    def close(self) -> None:
        """Removes the name (its owner) or unmaps the memory (others); mapped tensors stay valid."""
        if isinstance(self.mapped, Segment):
            if self.owner:
                self.mapped.unlink()
            self.mapped.close()
        elif self.owner:
            _process_maps.pop(self.address, None)
