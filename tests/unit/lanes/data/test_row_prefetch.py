import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from asyncrl.errors import LostRows
from asyncrl.lanes.data.row_reader import RowPrefetch
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import Batch, BatchRef, Column, RowRef


class Reader:
    """Reads when it may. reads: how many rows each time."""

    def __init__(self, store: RowStore) -> None:
        self._store, self.may_read = store, asyncio.Event()
        self.may_read.set()
        self.reads: list[int] = []

    async def read(self, refs: BatchRef, columns: Sequence[str]) -> Batch:
        self.reads.append(len(refs))
        await self.may_read.wait()
        rows = [self._store.read(row.places[0], columns) for row in refs]
        return Batch({name: Column.of([row[index] for row in rows]) for index, name in enumerate(columns)})


@pytest.fixture
def store() -> RowStore:
    return RowStore.private("inproc://rows", 16, 64)


@pytest.fixture
def reader(store: RowStore) -> Reader:
    return Reader(store)


@pytest.fixture
def ahead(reader: Reader) -> RowPrefetch:
    return RowPrefetch(reader, ["tokens"])  # type: ignore[arg-type]


def samples(store: RowStore, *members: int, attempt: int = 0) -> BatchRef:
    places = [store.put({"tokens": np.full(member + 1, member, np.int32)}) for member in members]
    stamps = (1, 1, 0, 0, "stop")
    return BatchRef(
        tuple(RowRef(0, member, attempt, 0, *stamps, (place,)) for member, place in zip(members, places, strict=True))
    )


def tokens(batch: Batch) -> list[list[int]]:
    return [row.tolist() for row in batch["tokens"]]


async def test_rows_that_were_foreseen_are_read_once_and_outlive_their_owner(
    store: RowStore, reader: Reader, ahead: RowPrefetch
) -> None:
    refs = samples(store, 0, 1, 2)
    assert await ahead.prefetch(refs) == [True] * 3
    store.close()
    assert tokens(await ahead.read(refs)) == [[0], [1, 1], [2, 2, 2]]
    assert tokens(await ahead.read(refs.take([2, 0]))) == [[2, 2, 2], [0]]
    assert tokens(await ahead.read(refs)) == [[0], [1, 1], [2, 2, 2]]
    assert reader.reads == [3]


async def test_other_rows_are_read_where_they_lie(store: RowStore, reader: Reader, ahead: RowPrefetch) -> None:
    await ahead.prefetch(samples(store, 0, 1))
    assert tokens(await ahead.read(samples(store, 1, 2))) == [[1, 1], [2, 2, 2]]
    assert tokens(await ahead.read(samples(store, 0, 1, attempt=1))) == [[0], [1, 1]]
    assert reader.reads == [2, 2, 2]


async def test_rows_that_are_gone_when_they_are_foreseen_are_not_held(store: RowStore, ahead: RowPrefetch) -> None:
    refs = samples(store, 0, 1)
    store.free(refs.rows[1].places)
    assert await ahead.prefetch(refs) == [False, False]
    with pytest.raises(LostRows):
        await ahead.read(refs)


async def test_a_step_waits_for_rows_that_are_just_being_read(
    store: RowStore, reader: Reader, ahead: RowPrefetch
) -> None:
    refs = samples(store, 0, 1)
    reader.may_read.clear()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        foreseeing = tasks.create_task(ahead.prefetch(refs))
        await asyncio.sleep(0)
        reading = tasks.create_task(ahead.read(refs))
        await asyncio.sleep(0)
        reader.may_read.set()
    assert foreseeing.result() == [True, True]
    assert tokens(reading.result()) == [[0], [1, 1]]
    assert reader.reads == [2]


async def test_a_batch_in_another_order_than_foreseen_gets_its_own_rows(store: RowStore, ahead: RowPrefetch) -> None:
    refs = samples(store, 0, 1, 2)
    await ahead.prefetch(refs)
    assert tokens(await ahead.read(refs.take([2, 0, 1]))) == [[2, 2, 2], [0], [1, 1]]
