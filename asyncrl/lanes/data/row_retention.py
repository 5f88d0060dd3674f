"""Remembers which rows a worker stores for which sample, so that they can be freed by the sample's name."""

from collections.abc import Iterable

from asyncrl.protocols.batch import Place, SampleName


class RowRetention:
    """Keeps the place of one row of each sample until the sample is released.

    Rows are freed by sample, because no caller may know a place: an answer can cross the end of its call.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], tuple[int, Place]] = {}

    def add(self, sample: SampleName, place: Place) -> list[Place]:
        """Adds a stored row. Returns the places to free: the row of an earlier attempt or call, or the new row itself
        when a later attempt has one."""
        group, member, attempt = sample
        newest, before = self._places.get((group, member), (attempt, None))
        if newest > attempt:
            return [place]
        self._places[group, member] = attempt, place
        return [] if before is None else [before]

    def release(self, samples: Iterable[SampleName], oldest: int) -> list[Place]:
        """Forgets these samples in these and earlier attempts, and all groups from 0 up to, without, `oldest`.

        Returns their places, to be freed.
        """
        keys = [(group, member) for group, member, attempt in samples if self._attempt(group, member) <= attempt]
        keys += [(group, member) for group, member in self._places if 0 <= group < oldest]
        return [self._places.pop(key)[1] for key in dict.fromkeys(keys) if key in self._places]

    def attempts(self) -> dict[tuple[int, int], int]:
        """Returns the attempt of each (group, member) that has a row here."""
        return {key: attempt for key, (attempt, _) in self._places.items()}

    def _attempt(self, group: int, member: int) -> int:
        return self._places[group, member][0] if (group, member) in self._places else 0
