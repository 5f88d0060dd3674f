"""Named shared memory, through which other processes of this host read weights without a copy."""

from dataclasses import dataclass
from typing import Final

from asyncrl.errors import PeerLost
from asyncrl.lanes.shared_memory import Segment

SCHEME: Final = "shm://"


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """Memory in a shared segment. owner: whether it was created here."""

    segment: Segment
    owner: bool

    @property
    def address(self) -> str:
        return SCHEME + self.segment.name

    @property
    def buffer(self) -> memoryview:
        return self.segment.buffer

    def close(self) -> None:
        if self.owner:
            self.segment.unlink()
        self.segment.close()


def create(name: str, size: int) -> SharedBlock:
    """Makes a block. Raises ArenaFull when shared memory is too small."""
    return SharedBlock(Segment.create(name, size), owner=True)


def attach(address: str) -> SharedBlock:
    """Maps a block. Raises PeerLost when its owner is gone."""
    try:
        return SharedBlock(Segment.open(address.removeprefix(SCHEME)), owner=False)
    except FileNotFoundError as gone:
        raise PeerLost(f"weight arena {address} is gone: its trainer has ended") from gone
