"""Reading rows by reference, wherever they lie."""

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
from asyncrl.memory import SHARED_MEMORY, Segment
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column, Place, RowRef
from asyncrl.protocols.messages import Call, Hello
from asyncrl.rows import MAX_COLUMNS, SHARED_SCHEME, RowStore, SharedTable, fetch
from asyncrl.wire.ends import Wire
from asyncrl.wire.host import Dispatch
from asyncrl.wire.link import Link

FETCH = "fetch_rows"
ROWS_PER_FETCH = 32
"""Of 2 MB each at the very most, well below the limit of one message."""

FETCH_DEADLINE = 30.0
"""Seconds for one fetch: 64 MB over a slow network."""

HELLO_DEADLINE = 5.0
"""Seconds for an owner to welcome us: it is up, or its rows are lost anyhow."""

KEPT_OWNERS = 64
"""Segments and links kept open; a fleet has fewer owners, restarted ones included."""


def serve_rows(store: RowStore) -> Dispatch:
    """What a Host on the owner's data lane dispatches to."""

    async def answer(call: Call) -> Batch:
        if call.method != FETCH or len(call.args) != 2:
            raise Refused(f"the data lane answers {FETCH}(places, columns), not {call.method}")
        places, columns = call.args
        if not (_are(places, Place, ROWS_PER_FETCH) and _are(columns, str, MAX_COLUMNS)):
            raise Refused(f"{FETCH} takes a list of at most {ROWS_PER_FETCH} places, and one of column names")
        return fetch(store, places, columns)

    return answer


def _are(values: object, kind: type, most: int) -> bool:
    return type(values) is list and len(values) <= most and all(type(value) is kind for value in values)


@dataclass(slots=True)
class _Share:
    """What one owner has of a read: places of rows `numbers`, the same columns of each."""

    columns: tuple[str, ...]
    numbers: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)


_NOTHING: Array = np.empty(0, np.uint8)
Cells = dict[str, list[Array]]
"""column -> its values in each row of the read."""


class RowReader:
    """Reads rows from any number of owners. Use as a context manager: it owns the links to remote owners.

    hello: who reads. heartbeat: seconds, for owners on other hosts.
    """

    def __init__(
        self, wire: Wire, hello: Hello, *, heartbeat: float | None = None, directory: Path = SHARED_MEMORY
    ) -> None:
        self._wire, self._hello, self._heartbeat, self._directory = wire, hello, heartbeat, directory
        self._tables: OrderedDict[str, SharedTable] = OrderedDict()
        self._links: OrderedDict[str, Link] = OrderedDict()
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
        for link in self._links.values():
            link.close()
        await self._group.__aexit__(None, None, None)

    async def read(self, refs: BatchRef, columns: Sequence[str]) -> Batch:
        """Copies of these columns of these rows, in the order of `refs`. Raises LostRows when a row was freed or
        overwritten, or its owner is gone; KeyError for a column that a row does not have."""
        async with self.borrowed(refs, columns) as cells:
            # Joining is the one copy; only afterwards is it known whether the rows still were what we wanted.
            return Batch({name: Column.of(rows) for name, rows in cells.items()})

    @asynccontextmanager
    async def borrowed(self, refs: BatchRef, columns: Sequence[str]) -> AsyncIterator[Cells]:
        """What `read` would copy, where it lies: for each column the values of each row, inside the block only.

        Raises what `read` raises; also at the end of the block, and then nothing seen inside counts.
        """
        cells: Cells = {name: [_NOTHING] * len(refs) for name in columns}
        shares = _shares(refs, columns)
        for owner, share in shares:
            if not owner.startswith(SHARED_SCHEME):
                await self._fetch(owner, share, cells)
        self._let_go()
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

    def _let_go(self) -> None:
        """Of rows whose owner is gone: their memory is only free once nobody maps it."""
        for owner in [owner for owner, table in self._tables.items() if table.segment.unlinked]:
            self._tables.pop(owner).close()

    def _table(self, owner: str) -> SharedTable:
        if owner not in self._tables:
            self._tables[owner] = self._open_table(owner)
        self._tables.move_to_end(owner)
        if len(self._tables) > KEPT_OWNERS:
            self._tables.popitem(last=False)[1].close()
        return self._tables[owner]

    def _open_table(self, owner: str) -> SharedTable:
        try:
            return SharedTable(Segment.open(owner.removeprefix(SHARED_SCHEME), directory=self._directory))
        except (OSError, ValueError) as error:
            raise LostRows(f"the owner of {owner} is gone: {error}") from error

    async def _fetch(self, owner: str, share: _Share, cells: Cells) -> None:
        try:
            link = await self._link(owner)
            for start in range(0, len(share.places), ROWS_PER_FETCH):
                part = slice(start, start + ROWS_PER_FETCH)
                rows = await link.call(FETCH, (share.places[part], list(share.columns)), FETCH_DEADLINE)
                _enter(rows, share, part, cells)
        except (PeerLost, DeadlineExceeded, Refused) as error:
            raise LostRows(f"the owner of {owner} is gone: {error}") from error

    async def _link(self, owner: str) -> Link:
        async with self._opening.setdefault(owner, asyncio.Lock()):
            if owner in self._links and self._links[owner].lost.is_set():
                self._links.pop(owner).close()
            if owner not in self._links:
                self._links[owner] = await self._open_link(owner)
        self._links.move_to_end(owner)
        if len(self._links) > KEPT_OWNERS:
            self._links.popitem(last=False)[1].close()
        return self._links[owner]

    async def _open_link(self, owner: str) -> Link:
        address, _, instance = owner.partition("#")
        link = Link(
            self._wire.connect(address), self._hello, owner, instance=instance or None, heartbeat=self._heartbeat
        )
        with ExitStack() as undo:
            undo.callback(link.close)
            await link.open(self._group, HELLO_DEADLINE)
            undo.pop_all()
        return link


def _shares(refs: BatchRef, columns: Sequence[str]) -> list[tuple[str, _Share]]:
    """The rows grouped by owner and by the columns to be had there."""
    shares: dict[tuple[str, tuple[str, ...]], _Share] = {}
    splits: dict[tuple[tuple[str, ...], ...], list[tuple[int, tuple[str, ...]]]] = {}
    for number, row in enumerate(refs):
        kind = tuple([place.columns for place in row.places])
        if kind not in splits:
            splits[kind] = _split(row, columns)
        for index, names in splits[kind]:
            place = row.places[index]
            share = shares.get((place.owner, names))
            if share is None:
                share = shares[place.owner, names] = _Share(names)
            share.numbers.append(number)
            share.places.append(place)
    return [(owner, share) for (owner, _), share in shares.items()]


def _split(row: RowRef, columns: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
    """Which of a row's places has which of the columns. Raises KeyError for a column that none has."""
    wanted: dict[int, list[str]] = {}
    for name in columns:
        wanted.setdefault(row.places.index(row.place_of(name)), []).append(name)
    return [(index, tuple(names)) for index, names in wanted.items()]


def _enter(rows: Batch, share: _Share, part: slice, cells: Cells) -> None:
    if set(rows.columns) != set(share.columns) or len(rows) != len(share.places[part]):
        raise WireError(
            f"{len(rows)} rows of {sorted(rows.columns)} came for {len(share.places[part])} of {share.columns}"
        )
    for name in share.columns:
        for number, values in zip(share.numbers[part], rows[name], strict=True):
            cells[name][number] = values
