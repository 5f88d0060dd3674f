"""Who may write and read which slot of a weight arena. Pure: no memory, no messages.

Two slots; version v lies in slot v mod 2. The trainer writes v + 1 while readers read v. Readers say `using(v)`
when they read nothing but v any more. Leases are messages, never shared words, so a reader that is killed holds
nothing once its death has been waited for and `detach` was said for it.
"""

from asyncrl.errors import Refused
from asyncrl.protocols.messages import Published

SLOTS = 2


def slot_of(version: int) -> int:
    return version % SLOTS


class Leases:
    """The writer's side: which version each attached reader reads, and what lies in the slots."""

    def __init__(self) -> None:
        self._reading: dict[str, int] = {}
        self._lying: dict[int, int] = {}

    def using(self, reader: str, version: int) -> None:
        """Reader reads `version` and no older one; its first call attaches it. Late repetitions change nothing.

        A reader that joins is attached *before* it is told to read, so that its slot cannot be written under it.

        Raises:
            Refused: the version lies in no slot (any more); the reader must ask for the newest.
        """
        if version <= self._reading.get(reader, -1):
            return
        if version not in self._lying.values():
            raise Refused(f"{reader} wants to read weights of version {version}; the arena holds {self.versions}")
        self._reading[reader] = version

    def detach(self, reader: str) -> None:
        """The reader is dead and was waited for, or has left."""
        self._reading.pop(reader, None)

    @property
    def versions(self) -> list[int]:
        """Versions that lie complete in the slots."""
        return sorted(self._lying.values())

    def holders(self, version: int) -> list[str]:
        """Readers that still keep `version` from being written: those who read what its slot holds."""
        other = self._lying.get(slot_of(version + 1))
        return sorted(reader for reader, reading in dict(self._reading).items() if reading != other)

    def begin(self, version: int) -> None:
        """The slot of `version` is about to be overwritten."""
        holders = self.holders(version)
        assert not holders, f"version {version} would overwrite the weights that {', '.join(holders)} read"
        self._lying.pop(slot_of(version), None)

    def wrote(self, version: int) -> None:
        """`version` lies complete in its slot."""
        self._lying[slot_of(version)] = version


def must_flip(current: Published | None, offered: Published) -> bool:
    """The reader's decision: True when `offered` is newer than what it reads; an offer it has passed changes nothing.

    Raises:
        Refused: the offer comes from another epoch of the run.
    """
    if current is None:
        return True
    if offered.epoch != current.epoch:
        raise Refused(f"weights of epoch {offered.epoch} were offered to a reader of epoch {current.epoch}")
    return offered.version > current.version
