"""Leases of readers that copy a version: they hold nothing, so the trainer waits for none of them."""

from asyncrl.lanes.weights.leases import Leases

BUFFERS = 3
"""Versions that a trainer holds for a network: the newest, one that is pulled, and one that is written."""


class CopiedVersions(Leases):
    """Takes reports of readers and remembers none."""

    def using(self, reader: str, version: int) -> None:
        return None
