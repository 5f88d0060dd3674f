"""Remembers which row of each sample a worker keeps, until the sample is released."""

from collections.abc import Iterable

from asyncrl.protocols.batch import Place, SampleName


class RowRetention:
    """Keeps the place of one row of each sample until the sample is released, because no caller may know a place: an
    answer can cross the end of its call. A release costs as much as it releases, whatever else is kept."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, tuple[int, Place]]] = {}
        self._oldest = 0
        self._late: set[int] = set()
        """Groups that had finished before their row was stored, for a call can outlive its group for a moment."""

    def add(self, sample: SampleName, place: Place) -> list[Place]:
        """Returns the places to free: the row of an earlier attempt or call, or the new row itself when a later attempt
        has one."""
        group, member, attempt = sample
        members = self._groups.setdefault(group, {})
        newest, before = members.get(member, (attempt, None))
        if newest > attempt:
            return [place]
        members[member] = attempt, place
        if 0 <= group < self._oldest:
            self._late.add(group)
        return [] if before is None else [before]

    def release(self, samples: Iterable[SampleName], oldest: int) -> list[Place]:
        """Forgets these samples in these and earlier attempts, and all groups from 0 up to, without, `oldest`; returns
        their places, to be freed."""
        released = []
        for group, member, attempt in samples:
            members = self._groups.get(group, {})
            if member in members and members[member][0] <= attempt:
                released.append(members.pop(member)[1])
                if not members:
                    del self._groups[group]
        for group in self._groups_before(oldest):
            released += [place for _, place in self._groups.pop(group).values()]
        return released

    def _groups_before(self, oldest: int) -> list[int]:
        """Returns the groups of the run before this one; each number is looked up once, or the groups if those are
        fewer."""
        late = self._late
        numbers = range(self._oldest, oldest)
        self._late = set()
        self._oldest = max(self._oldest, oldest)
        if len(numbers) > len(self._groups):
            return [group for group in self._groups if 0 <= group < self._oldest]
        return [group for group in (*sorted(late), *numbers) if group in self._groups]

    def attempts(self) -> dict[tuple[int, int], int]:
        """Returns the attempt of each (group, member) that has a row here."""
        return {
            (group, member): attempt
            for group, members in self._groups.items()
            for member, (attempt, _) in members.items()
        }
