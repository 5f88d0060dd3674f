"""Serves the rows of a store as frames, to readers that cannot map the shared memory of their owner."""

from asyncrl.errors import Refused
from asyncrl.lanes.control.server import Dispatch
from asyncrl.lanes.data.row_store import MAX_COLUMNS, RowStore
from asyncrl.protocols.batch import Batch, Column, Place
from asyncrl.protocols.messages import Call

FETCH = "fetch_rows"
ROWS_PER_FETCH = 32
"""Rows in one message; with at most 2 MB each they stay well below its limit."""


def serve_rows(store: RowStore) -> Dispatch:
    """Returns the dispatch function for a Server on the owner's data lane."""

    async def answer(call: Call) -> Batch:
        if call.method != FETCH or len(call.args) != 4:
            raise Refused(f"the data lane answers {FETCH}(slots, write_counts, stored, columns), not {call.method}")
        slots, counts, stored, columns = call.args
        numbers = _are_lists_of(int, ROWS_PER_FETCH, slots, counts) and len(slots) == len(counts)
        if not (numbers and _are_lists_of(str, MAX_COLUMNS, stored, columns)):
            raise Refused(f"{FETCH} takes two lists of at most {ROWS_PER_FETCH} numbers, and two of column names")
        names = tuple(stored)
        places = [Place(store.address, slot, count, names) for slot, count in zip(slots, counts, strict=True)]
        rows = [store.views(place, columns) for place in places]
        batch = Batch({name: Column.of([row[index] for row in rows]) for index, name in enumerate(columns)})
        for place in places:
            store.check(place)
        return batch

    return answer


def _are_lists_of(kind: type, most: int, *lists: object) -> bool:
    return all(type(each) is list and len(each) <= most and {*map(type, each)} <= {kind} for each in lists)
