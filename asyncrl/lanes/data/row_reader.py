"""Reads rows by reference, from shared memory or over the data lane of their owner, when or before they are needed."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Self, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from asyncrl.errors import DeadlineExceeded, LostRows, PeerLost, Refused, WireError
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.data.row_server import FETCH, ROWS_PER_FETCH
from asyncrl.lanes.data.row_store import RowTable
from asyncrl.lanes.shared_memory import SHARED_MEMORY, SHARED_SCHEME, Segment
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column, Place, RowRef, SampleName
from asyncrl.protocols.messages import Hello

FETCH_DEADLINE = 30.0
"""Seconds for one fetch: 64 MB over a slow network."""

OWNER_DEADLINE = 5.0
"""Seconds until an owner welcomes a reader; an owner that is not running has lost its rows."""

MAX_OPEN_OWNERS = 64
"""Segments and connections kept open; a fleet has fewer owners, restarted ones included."""


_EMPTY: Array = np.empty(0, np.uint8)
Cells = dict[str, list[Array]]
"""Column -> its values in each row of the read."""

Share = tuple[str, tuple[str, ...], tuple[str, ...]]
"""Rows to be read alike: their owner, the columns that it stores of each, and those of them that are wanted."""

Stored = list[tuple[int, Place]]
"""The rows of a share: number of the row in the read, and its place."""

Open = TypeVar("Open", RowTable, Client)


@dataclass(eq=False)
class RowReader:
    """Reads rows from any number of owners, whose segments and connections it closes at the end of its block.

    hello: identity of the reader. heartbeat: seconds between heartbeats, for owners on other hosts.
    """

    wire: Wire
    hello: Hello
    _: KW_ONLY
    heartbeat: float | None = None
    directory: Path = SHARED_MEMORY

    def __post_init__(self) -> None:
        self._tables: OrderedDict[str, RowTable] = OrderedDict()
        self._clients: OrderedDict[str, Client] = OrderedDict()
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
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
        """Yields what `read` would copy, as views that are valid inside the block. Raises what `read` raises, also at
        the end of the block; then nothing read from the views counts."""
        cells: Cells = {name: [_EMPTY] * len(refs) for name in columns}
        shares = _shares(refs, columns)
        for share, rows in shares.items():
            if not share[0].startswith(SHARED_SCHEME):
                await self._fetch(share, rows, cells)
        self._close_unlinked()
        viewed: list[tuple[RowTable, Place]] = []
        for (owner, _, names), rows in shares.items():
            if owner.startswith(SHARED_SCHEME):
                table = self._table(owner)
                for number, place in rows:
                    viewed.append((table, place))
                    for name, view in zip(names, table.views(place, names), strict=True):
                        cells[name][number] = view
        try:
            yield cells
        finally:
            for table, place in viewed:
                table.check(place)

    def _close_unlinked(self) -> None:
        """Closes segments whose owner is gone, because memory is freed once no process maps it."""
        for owner in [owner for owner, table in self._tables.items() if table.segment.unlinked]:
            self._tables.pop(owner).close()

    def _table(self, owner: str) -> RowTable:
        if owner not in self._tables:
            name = owner.removeprefix(SHARED_SCHEME)
            try:
                self._tables[owner] = RowTable(Segment.open(name, directory=self.directory))
            except (OSError, ValueError) as error:
                raise LostRows(f"the owner of {owner} is gone: {error}") from error
        return _used(self._tables, owner)

    async def _fetch(self, share: Share, stored: Stored, cells: Cells) -> None:
        owner, names, columns = share
        try:
            client = await self._client(owner)
            for start in range(0, len(stored), ROWS_PER_FETCH):
                part = stored[start : start + ROWS_PER_FETCH]
                slots, counts = [place.slot for _, place in part], [place.write_count for _, place in part]
                rows = await client.call(FETCH, (slots, counts, list(names), list(columns)), FETCH_DEADLINE)
                if set(rows.columns) != set(columns) or len(rows) != len(part):
                    raise WireError(f"{len(rows)} rows of {sorted(rows.columns)} came for {len(part)} of {columns}")
                for name in columns:
                    for (number, _), values in zip(part, rows[name], strict=True):
                        cells[name][number] = values
        except (PeerLost, DeadlineExceeded, Refused) as error:
            raise LostRows(f"the owner of {owner} is gone: {error}") from error

    async def _client(self, owner: str) -> Client:
        async with self._opening.setdefault(owner, asyncio.Lock()):
            if owner in self._clients and self._clients[owner].lost.is_set():
                self._clients.pop(owner).close()
            if owner not in self._clients:
                self._clients[owner] = await self._open_client(owner)
        return _used(self._clients, owner)

    async def _open_client(self, owner: str) -> Client:
        address, _, instance = owner.partition("#")
        caller = self.wire.connect(address)
        client = Client(caller, self.hello, owner, instance=instance or None, heartbeat=self.heartbeat)
        with ExitStack() as undo:
            undo.callback(client.close)
            await client.open(self._group, OWNER_DEADLINE)
            undo.pop_all()
        return client


def _used(opened: OrderedDict[str, Open], owner: str) -> Open:
    """Notes that this owner is read now; closes the one that was not read for longest when too many are open."""
    opened.move_to_end(owner)
    if len(opened) > MAX_OPEN_OWNERS:
        opened.popitem(last=False)[1].close()
    return opened[owner]


def _shares(refs: BatchRef, columns: Sequence[str]) -> dict[Share, Stored]:
    """Groups the rows by owner and by columns. Rows with the same columns are split alike."""
    shares: dict[Share, Stored] = {}
    splits: dict[tuple[tuple[str, ...], ...], list[tuple[int, tuple[str, ...]]]] = {}
    for number, row in enumerate(refs):
        kind = tuple([place.columns for place in row.places])
        if kind not in splits:
            splits[kind] = _split(row, columns)
        for index, names in splits[kind]:
            place = row.places[index]
            shares.setdefault((place.owner, place.columns, names), []).append((number, place))
    return shares


def _split(row: RowRef, columns: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
    """Returns which place of a row, by index, stores which columns. Raises KeyError for a column that none stores."""
    wanted: dict[int, list[str]] = {}
    for name in columns:
        wanted.setdefault(row.places.index(row.place_of(name)), []).append(name)
    return [(index, tuple(names)) for index, names in wanted.items()]


class RowPrefetch:
    """Reads the rows of the next batch before a step asks for them: these columns, until the next `prefetch`."""

    def __init__(self, reader: RowReader, columns: Sequence[str]) -> None:
        self._reader = reader
        self._columns = columns
        self._numbers: dict[SampleName, int] = {}
        self._rows = Batch({})
        self._reading = asyncio.Lock()

    async def prefetch(self, samples: BatchRef) -> list[bool]:
        """Reads these rows. Returns for each sample whether it is held now, which is true of all or of none."""
        async with self._reading:
            self._numbers = {}
            self._rows = Batch({})
            try:
                self._rows = await self._reader.read(samples, self._columns)
            except LostRows:
                return [False] * len(samples)
            self._numbers = {row.name: number for number, row in enumerate(samples)}
            return [True] * len(samples)

    async def read(self, samples: BatchRef) -> Batch:
        """Returns copies in the order of `samples`. Raises LostRows when a row is gone."""
        async with self._reading:
            numbers = [self._numbers.get(row.name, -1) for row in samples]
            if numbers and -1 not in numbers:
                return self._rows if numbers == list(range(len(self._rows))) else self._rows.take(numbers)
        return await self._reader.read(samples, self._columns)
