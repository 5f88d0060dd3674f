"""The rows of pictures: one for each group, stored where the group was sampled, and read once for all its samples."""

from collections.abc import Iterable

from asyncrl.engines.models.prompt_pictures import COLUMNS, PIXELS, PromptPictures
from asyncrl.lanes.data.row_reader import RowReader
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import BatchRef, Place, RowRef, SampleName
from asyncrl.protocols.messages import PromptGroup


class GroupPictures:
    """Stores the pictures of groups until all samples of a group that were asked for here are released."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._held: dict[int, dict[int, int]] = {}
        """Group -> newest attempt of each member."""

    def __len__(self) -> int:
        return len(self._places)

    def places(self, group: int) -> tuple[Place, ...]:
        """Returns where the pictures of a group are stored; nothing for one without pictures."""
        return (self._places[group],) if group in self._places else ()

    def add(self, rows: RowStore, prompts: PromptGroup, pictures: PromptPictures | None) -> None:
        """Stores the pictures of a group, unless an earlier attempt did: its samples may still be trained."""
        if pictures is None:
            return
        if prompts.id not in self._places:
            self._places[prompts.id] = rows.put(pictures.columns())
        self._held.setdefault(prompts.id, {}).update(dict.fromkeys(prompts.members, prompts.attempt))

    def release(self, samples: Iterable[SampleName], oldest: int) -> list[Place]:
        """Forgets these samples in these and earlier attempts, and all groups from 0 up to, without, `oldest`; returns
        the places of groups without samples, to be freed."""
        for group, member, attempt in samples:
            held = self._held.get(group, {})
            if held.get(member, attempt + 1) <= attempt:
                del held[member]
        ended = [group for group, held in self._held.items() if not held or 0 <= group < oldest]
        for group in ended:
            del self._held[group]
        return [self._places.pop(group) for group in ended]


async def read_pictures(reader: RowReader, samples: BatchRef) -> list[PromptPictures | None]:
    """Returns the pictures of each sample, the same object for all of one group. Raises LostRows."""
    places = [_place(row) for row in samples]
    first = {place: row.with_places((place,)) for place, row in zip(places, samples, strict=True) if place is not None}
    if not first:
        return [None] * len(samples)
    rows = await reader.read(BatchRef(tuple(first.values())), COLUMNS)
    found = {
        place: PromptPictures.of_columns({name: rows[name][number] for name in COLUMNS}, row.prompt_tokens)
        for number, (place, row) in enumerate(first.items())
    }
    return [None if place is None else found[place] for place in places]


def _place(row: RowRef) -> Place | None:
    return next((place for place in row.places if PIXELS in place.columns), None)
