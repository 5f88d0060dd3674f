"""Rows as frames over the data lanes of their owners: how a store serves them, and how a reader fetches them."""

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self
from weakref import WeakValueDictionary

from asyncrl.concurrency import gather
from asyncrl.errors import ALL_SLOTS, DeadlineExceeded, LostRows, PeerLost, Refused, WireError
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Dispatch
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.data.row_store import MAX_COLUMNS, RowStore
from asyncrl.protocols.batch import Array, Batch, Column, Place
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
