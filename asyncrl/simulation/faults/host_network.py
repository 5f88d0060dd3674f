"""The network between the hosts of a trial: messages of a partition come when it ends, and a dead host says nothing.

TCP sends again what was lost, so that a partition delays messages; what ends a call or a connection meanwhile are its
deadline and its heartbeats.
"""

import math
from typing import NamedTuple

from asyncrl.simulation.fakes.fake_service import now

ANY = ""
"""Stands for every other host in a partition."""


class Partition(NamedTuple):
    """Messages from `source` to `target` do not pass before `end`."""

    source: str
    target: str
    end: float


class HostNetwork:
    """Knows which hosts reach which. dead: hosts that lost their power, and have not come back."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self._partitions: list[Partition] = []

    def separate(self, source: str, target: str, seconds: float, *, one_way: bool) -> None:
        """Keeps messages from one host to another back, and those the other way unless the loss is one-way."""
        end = now() + seconds
        self._partitions = [each for each in self._partitions if each.end > now()]
        self._partitions.append(Partition(source, target, end))
        if not one_way:
            self._partitions.append(Partition(target, source, end))

    def passes_at(self, source: str, target: str) -> float:
        """Returns when a message that is sent now gets from one host to another."""
        ends = [each.end for each in self._partitions if _concerns(each, source, target)]
        return max(ends, default=0.0) if source != target else 0.0

    def end_known_at(self, host: str, peer: str) -> float:
        """Returns when a peer learns that a connection to this host was closed there now."""
        return math.inf if host in self.dead else self.passes_at(host, peer)


def _concerns(partition: Partition, source: str, target: str) -> bool:
    return partition.source in (ANY, source) and partition.target in (ANY, target)
