"""Reads rows by reference, from shared memory or over the data lane of their owner."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

import numpy as np

from asyncrl.errors import DeadlineExceeded, LostRows, PeerLost, Refused, WireError
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Dispatch
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.data.row_store import MAX_COLUMNS, SHARED_SCHEME, RowStore, SharedTable, fetch
from asyncrl.lanes.shared_memory import SHARED_MEMORY, Segment
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column, Place, RowRef
from asyncrl.protocols.messages import Call, Hello

FETCH = "fetch_rows"
ROWS_PER_FETCH = 32
"""Rows in one message; with at most 2 MB each they stay well below its limit."""

FETCH_DEADLINE = 30.0
"""Seconds for one fetch: 64 MB over a slow network."""

OWNER_DEADLINE = 5.0
"""Seconds until an owner welcomes a reader; an owner that is not running has lost its rows."""

MAX_OPEN_OWNERS = 64
"""Segments and connections kept open; a fleet has fewer owners, restarted ones included."""


def serve_rows(store: RowStore) -> Dispatch:
    """Returns the dispatch function for a Server on the owner's data lane."""

    async def answer(call: Call) -> Batch:
        if call.method != FETCH or len(call.args) != 2:
            raise Refused(f"the data lane answers {FETCH}(places, columns), not {call.method}")
        places, columns = call.args
        if not (_is_list_of(Place, places, ROWS_PER_FETCH) and _is_list_of(str, columns, MAX_COLUMNS)):
            raise Refused(f"{FETCH} takes a list of at most {ROWS_PER_FETCH} places, and one of column names")
        return fetch(store, places, columns)

    return answer


def _is_list_of(kind: type, values: object, most: int) -> bool:
    return type(values) is list and len(values) <= most and all(type(value) is kind for value in values)


@dataclass(slots=True)
class _OwnerRows:
    """The part of a read that one owner stores: the same columns of each row. numbers: of the rows in the read."""

    columns: tuple[str, ...]
    numbers: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)


_EMPTY: Array = np.empty(0, np.uint8)
Cells = dict[str, list[Array]]
"""Column -> its values in each row of the read."""


class RowReader:
    """Reads rows from any number of owners. As a context manager it owns the connections to remote owners.

    hello: identity of the reader. heartbeat: seconds between heartbeats, for owners on other hosts.
    """

    def __init__(
        self, wire: Wire, hello: Hello, *, heartbeat: float | None = None, directory: Path = SHARED_MEMORY
    ) -> None:
        self._wire = wire
        self._hello = hello
        self._heartbeat = heartbeat
        self._directory = directory
        self._tables: OrderedDict[str, SharedTable] = OrderedDict()
        self._clients: OrderedDict[str, Client] = OrderedDict()
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for table in self._tables.values():
            table.close()
        for client in self._clients.values():
            client.close()
        await self._group.__aexit__(None, None, None)

    async def read(self, refs: BatchRef, columns: Sequence[str]) -> Batch:
        """Returns copies of these columns of these rows, in the order of `refs`.

        Raises:
            LostRows: a row was freed or overwritten, or its owner is gone.
            KeyError: a row lacks a column.
        """
        async with self.views(refs, columns) as cells:
            # Joining is the only copy; the end of the block checks that no row changed meanwhile.
            return Batch({name: Column.of(rows) for name, rows in cells.items()})

    @asynccontextmanager
    async def views(self, refs: BatchRef, columns: Sequence[str]) -> AsyncIterator[Cells]:
        """Yields what `read` would copy, as views that are valid inside the block.

        Raises what `read` raises, also at the end of the block; then nothing read from the views counts.
        """
        cells: Cells = {name: [_EMPTY] * len(refs) for name in columns}
        shares = _shares(refs, columns)
        for owner, share in shares:
            if not owner.startswith(SHARED_SCHEME):
                await self._fetch(owner, share, cells)
        self._close_unlinked()
        shared = [(self._table(owner), share) for owner, share in shares if owner.startswith(SHARED_SCHEME)]
        for table, share in shared:
            for number, place in zip(share.numbers, share.places, strict=True):
                for name, view in zip(share.columns, table.views(place, share.columns), strict=True):
                    cells[name][number] = view
        try:
            yield cells
        finally:
            for table, share in shared:
                for place in share.places:
                    table.check(place)

    def _close_unlinked(self) -> None:
        """Closes segments whose owner is gone, because memory is freed once no process maps it."""
        for owner in [owner for owner, table in self._tables.items() if table.segment.unlinked]:
            self._tables.pop(owner).close()

    def _table(self, owner: str) -> SharedTable:
        if owner not in self._tables:
            self._tables[owner] = self._open_table(owner)
        self._tables.move_to_end(owner)
        if len(self._tables) > MAX_OPEN_OWNERS:
            self._tables.popitem(last=False)[1].close()
        return self._tables[owner]

    def _open_table(self, owner: str) -> SharedTable:
        try:
            return SharedTable(Segment.open(owner.removeprefix(SHARED_SCHEME), directory=self._directory))
        except (OSError, ValueError) as error:
            raise LostRows(f"the owner of {owner} is gone: {error}") from error

    async def _fetch(self, owner: str, share: _OwnerRows, cells: Cells) -> None:
        try:
            client = await self._client(owner)
            for start in range(0, len(share.places), ROWS_PER_FETCH):
                part = slice(start, start + ROWS_PER_FETCH)
                rows = await client.call(FETCH, (share.places[part], list(share.columns)), FETCH_DEADLINE)
                _fill(rows, share, part, cells)
        except (PeerLost, DeadlineExceeded, Refused) as error:
            raise LostRows(f"the owner of {owner} is gone: {error}") from error

    async def _client(self, owner: str) -> Client:
        async with self._opening.setdefault(owner, asyncio.Lock()):
            if owner in self._clients and self._clients[owner].lost.is_set():
                self._clients.pop(owner).close()
            if owner not in self._clients:
                self._clients[owner] = await self._open_client(owner)
        self._clients.move_to_end(owner)
        if len(self._clients) > MAX_OPEN_OWNERS:
            self._clients.popitem(last=False)[1].close()
        return self._clients[owner]

    async def _open_client(self, owner: str) -> Client:
        address, _, instance = owner.partition("#")
        client = Client(
            self._wire.connect(address), self._hello, owner, instance=instance or None, heartbeat=self._heartbeat
        )
        with ExitStack() as undo:
            undo.callback(client.close)
            await client.open(self._group, OWNER_DEADLINE)
            undo.pop_all()
        return client


def _shares(refs: BatchRef, columns: Sequence[str]) -> list[tuple[str, _OwnerRows]]:
    """Groups the rows by owner and by the columns stored there."""
    shares: dict[tuple[str, tuple[str, ...]], _OwnerRows] = {}
    splits: dict[tuple[tuple[str, ...], ...], list[tuple[int, tuple[str, ...]]]] = {}
    for number, row in enumerate(refs):
        kind = tuple([place.columns for place in row.places])
        if kind not in splits:
            splits[kind] = _split(row, columns)
        for index, names in splits[kind]:
            place = row.places[index]
            share = shares.get((place.owner, names))
            if share is None:
                share = shares[place.owner, names] = _OwnerRows(names)
            share.numbers.append(number)
            share.places.append(place)
    return [(owner, share) for (owner, _), share in shares.items()]


def _split(row: RowRef, columns: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
    """Returns which place of a row, by index, stores which columns. Raises KeyError for a column that none stores."""
    wanted: dict[int, list[str]] = {}
    for name in columns:
        wanted.setdefault(row.places.index(row.place_of(name)), []).append(name)
    return [(index, tuple(names)) for index, names in wanted.items()]


def _fill(rows: Batch, share: _OwnerRows, part: slice, cells: Cells) -> None:
    if set(rows.columns) != set(share.columns) or len(rows) != len(share.places[part]):
        raise WireError(
            f"{len(rows)} rows of {sorted(rows.columns)} came for {len(share.places[part])} of {share.columns}"
        )
    for name in share.columns:
        for number, values in zip(share.numbers[part], rows[name], strict=True):
            cells[name][number] = values
