"""Which rows lie with a worker, by the sample that they belong to."""

from collections.abc import Iterable

from asyncrl.protocols.batch import Place, SampleName


class Kept:
    """The place of one row of each sample, until the sample is done with.

    Rows are let go by their sample's name: a place may be known to nobody, when an answer crossed the end of its call.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], tuple[int, Place]] = {}

    def add(self, sample: SampleName, place: Place) -> list[Place]:
        """A row was stored. Returns what nobody waits for now: the row of an earlier attempt (or of an earlier call for
        this one), or the new row itself when a later attempt has one already."""
        group, member, attempt = sample
        newest, before = self._places.get((group, member), (attempt, None))
        if newest > attempt:
            return [place]
        self._places[group, member] = attempt, place
        return [] if before is None else [before]

    def let_go(self, samples: Iterable[SampleName], oldest: int) -> list[Place]:
        """These samples are done with, in these attempts and earlier ones, and all groups from 0 to before `oldest`.
        Returns their places."""
        keys = [(group, member) for group, member, attempt in samples if self._attempt(group, member) <= attempt]
        keys += [(group, member) for group, member in self._places if 0 <= group < oldest]
        return [self._places.pop(key)[1] for key in dict.fromkeys(keys) if key in self._places]

    def _attempt(self, group: int, member: int) -> int:
        return self._places[group, member][0] if (group, member) in self._places else 0
