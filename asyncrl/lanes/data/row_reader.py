"""Reads rows by reference, from shared memory or over the data lane of their owner, which serves them as frames.

read ── what is stored where ── fetch from remote owners ── views of shared rows ── join ── second look
        (a thread, when rows are many)                      (in the same thread, one copy in all)
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar, TypeVarTuple, Unpack
from weakref import WeakValueDictionary

import numpy as np

from asyncrl.concurrency import gather
from asyncrl.errors import ALL_SLOTS, DeadlineExceeded, LostRows, PeerLost, Refused, WireError
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Dispatch
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.data.row_store import MAX_COLUMNS, RowStore, RowTable
from asyncrl.lanes.shared_memory import SHARED_MEMORY, SHARED_SCHEME, Segment
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column, Place, RowRef, SampleName
from asyncrl.protocols.messages import Call, Hello

# Serves the rows of a store as frames, to readers that cannot map the shared memory of their owner.


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


# Fetches rows as frames over the data lanes of their owners: from many owners at once, several chunks on their way.


FETCH_DEADLINE = 30.0
"""Seconds for one chunk: 64 MB over a slow network, which CHUNKS_AT_ONCE share."""

OWNER_DEADLINE = 5.0
"""Seconds until an owner welcomes a reader; an owner that is not running has lost its rows."""

CHUNKS_AT_ONCE = 32
"""Chunks that a reader waits for at once, of all owners together. While some travel, others are packed; more would only
share the network, and wait longer within their deadline."""

REMEMBERED_GONE = 256
"""Dead owners that a reader remembers: more than can own rows of one batch."""

Cells = dict[str, list[Array]]
"""Column -> its values in each row of the read."""

Share = tuple[str, tuple[str, ...], tuple[str, ...]]
"""Rows to be read alike: their owner, the columns that it stores of each, and those of them that are wanted."""

Stored = list[tuple[int, Place]]
"""The rows of a share: number of the row in the read, and its place."""


class ConnectionLost(PeerLost):
    """An established connection broke, as it also does on its way to an owner that lives."""


@dataclass(eq=False)
class RowFetcher:
    """Keeps a connection to each owner that it has fetched from, until the owner is lost or the block ends.

    The number of connections grows with the fleet; memory and file descriptors bound it (`deploy/preflight.py`).
    """

    wire: Wire
    hello: Hello
    _: KW_ONLY
    heartbeat: float | None = None

    def __post_init__(self) -> None:
        self.clients: dict[str, Client] = {}
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._group = asyncio.TaskGroup()
        self._free_chunks = asyncio.Semaphore(CHUNKS_AT_ONCE)
        self._gone: deque[str] = deque(maxlen=REMEMBERED_GONE)

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients.values():
            client.close()
        await self._group.__aexit__(None, None, None)

    def give_up(self, instance: str) -> None:
        """Makes fetches from an owner that is known to be gone fail at once, those that wait for it, too: its silence
        would show only after several heartbeats."""
        self._gone.append(instance)
        for owner, client in self.clients.items():
            if owner.rpartition("#")[2] == instance:
                client.fail(f"{instance} is gone")

    async def fetch(self, shares: Iterable[tuple[Share, Stored]], cells: Cells) -> None:
        """Puts these rows into `cells`. Raises LostRows when an owner is gone, or late on two connections, or does not
        hold a row any more."""
        chunks = [
            (share, stored[start : start + ROWS_PER_FETCH])
            for share, stored in shares
            for start in range(0, len(stored), ROWS_PER_FETCH)
        ]
        await gather(*(self._fetch_chunk(share, chunk, cells) for share, chunk in chunks))

    async def _fetch_chunk(self, share: Share, chunk: Stored, cells: Cells) -> None:
        owner, names, columns = share
        slots = [place.slot for _, place in chunk]
        counts = [place.write_count for _, place in chunk]
        args = (slots, counts, list(names), list(columns))
        try:
            try:
                rows = await self._call(owner, args)
            except (ConnectionLost, DeadlineExceeded):
                rows = await self._call(owner, args)  # Late is not lost: on another connection.
        except (PeerLost, DeadlineExceeded, Refused) as error:
            raise LostRows(f"the owner of {owner} is gone: {error}", [(owner, ALL_SLOTS)]) from error
        if set(rows.columns) != set(columns) or len(rows) != len(chunk):
            raise WireError(f"{len(rows)} rows of {sorted(rows.columns)} came for {len(chunk)} of {columns}")
        for name in columns:
            for (number, _), values in zip(chunk, rows[name], strict=True):
                cells[name][number] = values

    async def _call(self, owner: str, args: tuple[Any, ...]) -> Batch:
        """Calls an owner; a connection on which an answer is late is not used again. Raises ConnectionLost when an
        established connection broke, and what `Client` raises."""
        client = await self._client(owner)
        try:
            async with self._free_chunks:
                rows: Batch = await client.call(FETCH, args, FETCH_DEADLINE)
                return rows
        except DeadlineExceeded as late:
            client.fail(str(late))
            raise
        except PeerLost as lost:
            raise ConnectionLost(str(lost)) from lost

    async def _client(self, owner: str) -> Client:
        async with self._opening.setdefault(owner, asyncio.Lock()):
            client = self.clients.get(owner)
            if client is None or client.lost.is_set():
                self._close_lost()
                client = await self._open_client(owner)
            return client

    def _close_lost(self) -> None:
        """Closes connections to owners that are gone: a restarted owner has another name, so nobody asks for them."""
        for owner in [owner for owner, client in self.clients.items() if client.lost.is_set()]:
            self.clients.pop(owner).close()

    async def _open_client(self, owner: str) -> Client:
        address, _, instance = owner.partition("#")
        if instance in self._gone:
            raise PeerLost(f"{instance} is gone")
        caller = self.wire.connect(address)
        client = Client(caller, self.hello, owner, instance=instance or None, heartbeat=self.heartbeat)
        self.clients[owner] = client  # Before it is open, so that `give_up` ends the wait for that.
        with ExitStack() as undo:
            undo.callback(client.close)
            await client.open(self._group, OWNER_DEADLINE)
            undo.pop_all()
        return client


# The thread that copies many rows, so that the event loop answers meanwhile.


INLINE_TOKENS = 128 * 1024
"""Tokens that are copied on the event loop, in at most a few milliseconds."""

ROW_COST = 512
"""Tokens whose copy takes as long as finding one row."""

_thread = ThreadPoolExecutor(1, thread_name_prefix="rows")
"""Starts its thread at its first use. It is not the compute thread, which a training step occupies for minutes."""

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


async def run_for_rows(refs: BatchRef, function: Callable[[Unpack[Arguments]], Result], *args: *Arguments) -> Result:
    """Returns the result of a function that handles these rows: here when they are few, else in the thread of rows.
    Cancelling the wait does not stop a function that has begun."""
    if sum(row.length + ROW_COST for row in refs) <= INLINE_TOKENS:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_thread, function, *args)


UNLINKED_CHECKS = 16
"""Segments of which each read checks whether their owner is gone: all in turn, at the same cost for every fleet."""

_EMPTY: Array = np.empty(0, np.uint8)
Tables = Mapping[str, RowTable]
Shares = Mapping[Share, Stored]


@dataclass(eq=False)
class RowReader:
    """Reads rows from any number of owners, whose segments and connections it closes at the end of its block.

    hello: identity of the reader. heartbeat: seconds between heartbeats, for owners on other hosts. bytes_read: of all
    rows read so far. A segment is mapped until its owner is gone, so that memory and file descriptors (one each)
    bound their number.
    """

    wire: Wire
    hello: Hello
    _: KW_ONLY
    heartbeat: float | None = None
    directory: Path = SHARED_MEMORY

    def __post_init__(self) -> None:
        self.bytes_read = 0
        self._tables: dict[str, RowTable] = {}
        self._fetcher = RowFetcher(self.wire, self.hello, heartbeat=self.heartbeat)

    async def __aenter__(self) -> Self:
        await self._fetcher.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tables.clear()
        await self._fetcher.__aexit__()

    def give_up(self, instance: str) -> None:
        """Makes reads of rows that this instance owns raise LostRows at once: it is dead, or cut off from all."""
        self._fetcher.give_up(instance)

    async def read(self, refs: BatchRef, columns: Sequence[str]) -> Batch:
        """Returns copies of these columns of these rows, in the order of `refs`.

        Raises:
            LostRows: a row was freed or overwritten, or its owner is gone.
            KeyError: a row lacks a column.
        """
        shares = await run_for_rows(refs, _shares, refs, columns)
        cells, tables = await self._collect(shares, len(refs), columns)
        rows = await run_for_rows(refs, _join, shares, tables, cells)
        self.bytes_read += sum(column.values.nbytes for column in rows.columns.values())
        return rows

    @asynccontextmanager
    async def views(self, refs: BatchRef, columns: Sequence[str]) -> AsyncIterator[Cells]:
        """Yields what `read` would copy, as views that are valid inside the block. Raises what `read` raises, also at
        the end of the block; then nothing read from the views counts."""
        shares = _shares(refs, columns)
        cells, tables = await self._collect(shares, len(refs), columns)
        with _checked_views(shares, tables, cells):
            self.bytes_read += sum(values.nbytes for rows in cells.values() for values in rows)
            yield cells

    async def _collect(self, shares: Shares, rows: int, columns: Sequence[str]) -> tuple[Cells, Tables]:
        """Fetches remote rows, and returns them with the tables of all shared ones."""
        cells: Cells = {name: [_EMPTY] * rows for name in columns}
        remote = [item for item in shares.items() if not item[0][0].startswith(SHARED_SCHEME)]
        if remote:
            await self._fetcher.fetch(remote, cells)
        self._forget_unlinked()
        return cells, {owner: self._table(owner) for owner, _, _ in shares if owner.startswith(SHARED_SCHEME)}

    def _forget_unlinked(self) -> None:
        """Forgets segments whose owner is gone, because memory is freed once no process maps it. A read that still has
        views of one keeps it until it ends."""
        for owner in list(islice(self._tables, UNLINKED_CHECKS)):
            table = self._tables.pop(owner)
            if not table.segment.unlinked:
                self._tables[owner] = table

    def _table(self, owner: str) -> RowTable:
        if owner not in self._tables:
            name = owner.removeprefix(SHARED_SCHEME)
            try:
                self._tables[owner] = RowTable(Segment.open(name, directory=self.directory))
            except (OSError, ValueError) as error:
                raise LostRows(f"the owner of {owner} is gone: {error}", [(owner, ALL_SLOTS)]) from error
        return self._tables[owner]


def _join(shares: Shares, tables: Tables, cells: Cells) -> Batch:
    """Copies all rows into one batch. Joining is the only copy."""
    with _checked_views(shares, tables, cells):
        return Batch({name: Column.of(rows) for name, rows in cells.items()})


@contextmanager
def _checked_views(shares: Shares, tables: Tables, cells: Cells) -> Iterator[None]:
    """Puts views of shared rows into `cells`. Takes the second look at every row at the end of the block: raises
    LostRows when one was freed while it was read."""
    viewed: list[tuple[RowTable, Place]] = []
    for (owner, _, names), rows in shares.items():
        if (table := tables.get(owner)) is not None:
            for number, place in rows:
                viewed.append((table, place))
                for name, view in zip(names, table.views(place, names), strict=True):
                    cells[name][number] = view
    try:
        yield
    finally:
        for table, place in viewed:
            table.check(place)


def _shares(refs: BatchRef, columns: Sequence[str]) -> Shares:
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


# Reads the rows of the next batch before a step asks for them.


class RowPrefetch:
    """Holds these columns of the rows of the next batch until the next `prefetch`: of all its samples, or of none.

    A service of the trainer prefetches during a step, and reads when the next one begins; a read of other samples
    goes to the reader.
    """

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
                if numbers == list(range(len(self._rows))):
                    return self._rows
                return await run_for_rows(samples, self._rows.take, numbers)
        return await self._reader.read(samples, self._columns)
