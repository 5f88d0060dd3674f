"""Remembers which replicas of a service may hold rows of which samples: those of their calls, answered or not.

A sample of several turns may have rows at several replicas; the call that came last made the newest ones.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from asyncrl.protocols.batch import BatchRef, SampleName
from asyncrl.protocols.messages import PromptGroup

R = TypeVar("R", bound=Hashable)


@dataclass(slots=True)
class _Held(Generic[R]):
    """Members of one attempt at a group that a replica may hold. members: bit member + 1 of a number, for the greedy
    answer is member -1. newest: those of them that no other replica was called for later."""

    replica: R
    attempt: int
    members: int
    newest: int


class RowHolders(Generic[R]):
    """Holders by group; an entry lives until its samples are released, so samples in flight bound their number."""

    def __init__(self) -> None:
        self._held: dict[int, list[_Held[R]]] = {}

    def add(self, replica: R, argument: Any) -> None:
        """Notes that a call with this argument makes rows at a replica."""
        if isinstance(argument, PromptGroup):
            members = sum(_bit(member) for member in argument.members)
            self._add(replica, argument.id, argument.attempt, members)
        elif isinstance(argument, BatchRef):
            for row in argument:
                self._add(replica, row.group, row.attempt, _bit(row.member))

    def _add(self, replica: R, group: int, attempt: int, members: int) -> None:
        own = None
        for held in self._held.setdefault(group, []):
            if held.attempt == attempt:
                held.newest &= ~members
                if held.replica is replica:
                    own = held
        if own is None:
            own = _Held(replica, attempt, 0, 0)
            self._held[group].append(own)
        own.members |= members
        own.newest |= members

    def newest(self, samples: BatchRef | Iterable[SampleName]) -> R | None:
        """Returns the replica that was called last for the most of these samples; None when no replica was."""
        found: dict[R, int] = {}
        for group, member, attempt in _names(samples):
            for held in self._held.get(group, ()):
                if held.attempt == attempt and held.newest & _bit(member):
                    found[held.replica] = found.get(held.replica, 0) + 1
        return max(found, key=found.__getitem__, default=None)

    def holds(self, replica: R) -> bool:
        """Returns whether a replica may hold rows of any sample."""
        return any(held.replica is replica for group in self._held.values() for held in group)

    def split(self, samples: BatchRef | Iterable[SampleName]) -> dict[R, list[int]]:
        """Returns the indices of the samples of which each replica may hold a row of this or an earlier attempt."""
        found: dict[R, list[int]] = {}
        for index, (group, member, attempt) in enumerate(_names(samples)):
            for held in self._held.get(group, ()):
                if held.attempt <= attempt and held.members & _bit(member):
                    rows = found.setdefault(held.replica, [])
                    if not rows or rows[-1] != index:  # Two attempts may have run at one replica.
                        rows.append(index)
        return found

    def forget(self, replica: R, samples: BatchRef | Iterable[SampleName]) -> None:
        """Notes that a replica holds no row of these samples any more, in these attempts and earlier ones."""
        for group, member, attempt in _names(samples):
            left = []
            for held in self._held.get(group, ()):
                if held.replica is replica and held.attempt <= attempt:
                    held.members &= ~_bit(member)
                    held.newest &= held.members
                if held.members:
                    left.append(held)
            if left:
                self._held[group] = left
            else:
                self._held.pop(group, None)

    def clear(self) -> None:
        self._held.clear()

    def __len__(self) -> int:
        """Returns the number of groups of which some replica may hold rows."""
        return len(self._held)


def _names(samples: BatchRef | Iterable[SampleName]) -> Iterable[SampleName]:
    return (row.name for row in samples) if isinstance(samples, BatchRef) else samples


def _bit(member: int) -> int:
    return 1 << (member + 1)
