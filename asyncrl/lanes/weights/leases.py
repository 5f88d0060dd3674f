"""Says when weights may change: leases of readers on two slots, and the permit that a step in lockstep waits for."""

import asyncio
from contextlib import suppress
from typing import NamedTuple

from asyncrl.errors import Refused
from asyncrl.protocols.messages import Published
from asyncrl.protocols.weight_transports import SLOTS

# The report of a receiver about one version.


class Fetched(NamedTuple):
    """Says what it took to bring a version here. bytes: that crossed a network or were read. error: the largest share
    of rounding of any part: the root mean square of its errors over that of its weights; 0 if all are exact."""

    bytes: int = 0
    error: float = 0.0


# Leases on the two slots of a weight arena, without memory or messages.
#
# Version v is stored in slot v mod 2. The trainer writes v + 1 while readers read v. A reader sends `using(v)` when it
# reads nothing but v. A killed reader holds nothing once its process was waited for and `detach` was called for it.


def slot_of(version: int) -> int:
    return version % SLOTS


class Leases:
    """Knows, on the writer's side, which version each attached reader reads and which versions the slots hold."""

    def __init__(self) -> None:
        self._reading: dict[str, int] = {}
        self._stored: dict[int, int] = {}

    def using(self, reader: str, version: int) -> None:
        """Notes that a reader reads `version` and no older one. Its first call attaches it, *before* it starts to read,
        so that its slot cannot be overwritten meanwhile. Repeats change nothing.

        Raises:
            Refused: no slot holds the version (any more); the reader must ask for the newest.
        """
        if version <= self._reading.get(reader, -1):
            return
        if version not in self._stored.values():
            raise Refused(f"{reader} wants to read weights of version {version}; the arena holds {self.versions}")
        self._reading[reader] = version

    def detach(self, reader: str) -> None:
        """Forgets a reader that has left, or that is dead and was waited for."""
        self._reading.pop(reader, None)

    @property
    def versions(self) -> list[int]:
        """Versions that the slots hold completely."""
        return sorted(self._stored.values())

    def holders(self, version: int) -> list[str]:
        """Returns the readers that read what the slot of `version` holds, and so keep it from being written."""
        other = self._stored.get(slot_of(version + 1))
        return sorted(reader for reader, reading in dict(self._reading).items() if reading != other)

    def begin_write(self, version: int) -> None:
        """Notes that the slot of `version` is being overwritten."""
        holders = self.holders(version)
        assert not holders, f"version {version} would overwrite the weights that {', '.join(holders)} read"
        self._stored.pop(slot_of(version), None)

    def end_write(self, version: int) -> None:
        """Notes that the slot of `version` holds it completely."""
        self._stored[slot_of(version)] = version


def must_flip(current: Published | None, offered: Published) -> bool:
    """Returns whether a reader must switch to `offered`, because it is newer than what the reader reads. Raises Refused
    for an offer of another incarnation of the run."""
    if current is None:
        return True
    if offered.incarnation != current.incarnation:
        raise Refused(
            f"weights of incarnation {offered.incarnation} were offered to a reader of incarnation "
            f"{current.incarnation}"
        )
    return offered.version > current.version


# Leases of readers that copy a version: they hold nothing, so the trainer waits for none of them.


class CopiedVersions(Leases):
    """Takes reports of readers and remembers none."""

    def using(self, reader: str, version: int) -> None:
        return None


# Lets a step in lockstep wait, with its passes computed, until the controller allows its update.


PERIOD = 1.0
"""Seconds after which a wait counts as progress: fewer than the deadline of any call."""


class UpdatePermit:
    """Holds back the update of a step in lockstep, until the controller allows it. periods: of waiting, which count as
    progress: who has to be waited for hangs, if anybody does, and its own calls have deadlines."""

    def __init__(self) -> None:
        self.periods = 0
        self._allowed = (-1, -1)
        self._changed = asyncio.Event()

    def allow(self, incarnation: int, version: int) -> None:
        self._allowed = (incarnation, version)
        self._changed.set()

    async def wait(self, incarnation: int, version: int) -> None:
        """Waits until a step from this version may change the weights, once."""
        while self._allowed != (incarnation, version):
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD):
                    await self._changed.wait()
            self.periods += 1
        self._allowed = (-1, -1)  # A step that trains nothing is tried again from the same version.
