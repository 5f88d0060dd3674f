"""Rows of samples go into a file and come back out of it, whole or not at all."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import ALL_SLOTS, LostRows, WireError
from asyncrl.lanes.data import row_file
from asyncrl.lanes.data.row_file import RowFileWriter, store_again
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import Batch, BatchRef, Column, Place, RowRef, SampleName, restored_columns

SAMPLES = 12


class Reader:
    """Reads rows out of stores by the address of their owner. gone: owners that cannot be asked any more."""

    def __init__(self, *stores: RowStore) -> None:
        self.stores = {store.address: store for store in stores}
        self.gone: set[str] = set()
        self.reads = 0

    async def read(self, refs: BatchRef, columns: list[str]) -> Batch:
        self.reads += 1
        for row in refs:
            for place in row.places:
                if place.owner in self.gone:
                    raise LostRows(f"{place.owner} is gone", [(place.owner, ALL_SLOTS)])
        cells = [[self.stores[(p := row.place_of(name)).owner].read(p, [name])[0] for row in refs] for name in columns]
        return Batch({name: Column.of(rows) for name, rows in zip(columns, cells, strict=True)})


def stores() -> tuple[RowStore, RowStore]:
    return RowStore.private("a#1", 32, 4096), RowStore.private("b#2", 32, 4096)


def sampled(made: RowStore, judged: RowStore) -> BatchRef:
    """Returns samples of which every second one has a column elsewhere, too."""
    rows = []
    for member in range(SAMPLES):
        tokens = np.arange(member + 1, dtype=np.int32)
        places: tuple[Place, ...] = (made.put({"response_ids": tokens, "text": np.zeros(3, np.uint8)}),)
        if member % 2:
            places += (judged.put({"reference_logprobs": tokens.astype(np.float32)}),)
        rows.append(RowRef(member // 4, member % 4, 2, 7, 5, member + 1, 3, 4, "stop", places, 0.5, cost=0.25))
    return BatchRef(tuple(rows))


async def inline(function: Any, *args: Any) -> Any:
    return function(*args)


async def written(reader: Reader, samples: BatchRef, **limits: int) -> tuple[RowFileWriter, BytesIO]:
    file = BytesIO()
    writer = RowFileWriter(file, reader, inline, **limits)
    await writer.save(samples)
    file.seek(0)
    return writer, file


def kept_in(store: RowStore) -> Any:
    def keep(sample: SampleName, columns: Any) -> Place:
        return store.put(columns)

    return keep


async def test_rows_come_back_whole_with_every_column_in_one_place_and_of_the_new_incarnation() -> None:
    made, judged = stores()
    reader = Reader(made, judged)
    samples = sampled(made, judged)
    writer, file = await written(reader, samples)
    assert writer.saved == [row.name for row in samples]
    again = RowStore.private("c#3", 32, 4096)
    found = await store_again(file, samples, 8, kept_in(again), inline)
    assert [row._replace(places=(), incarnation=7) for row in found] == [row._replace(places=()) for row in samples]
    assert {row.incarnation for row in found} == {8}
    for before, after in zip(samples, found, strict=True):
        (place,) = after.places
        assert place.owner == "c#3"
        assert set(place.columns) == {name for each in before.places for name in each.columns}
        both = BatchRef((before,)), BatchRef((after,))
        old, new = [await Reader(made, judged, again).read(each, sorted(place.columns)) for each in both]
        for name in place.columns:
            np.testing.assert_array_equal(old[name][0], new[name][0])
            assert old[name].values.dtype == new[name].values.dtype


async def test_only_the_samples_that_are_asked_for_are_stored_again() -> None:
    made, judged = stores()
    samples = sampled(made, judged)
    _, file = await written(Reader(made, judged), samples)
    again = RowStore.private("c#3", 32, 4096)
    other = samples.rows[3]._replace(attempt=3)
    found = await store_again(file, BatchRef((samples.rows[5], other)), 8, kept_in(again), inline)
    assert [row.name for row in found] == [samples.rows[5].name]
    assert again.used == 1


async def test_rows_that_are_gone_are_left_out_and_a_dead_owner_is_asked_once() -> None:
    made, judged = stores()
    reader = Reader(made, judged)
    samples = sampled(made, judged)
    made.free(samples.rows[2].places)
    reader.gone.add(judged.address)
    writer, _ = await written(reader, samples)
    assert writer.saved == [row.name for row in samples.rows[::2] if row != samples.rows[2]]
    parts = SAMPLES  # Columns change with each sample, so each is a part of its own.
    assert reader.reads <= parts


async def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made, judged = stores()
    samples = sampled(made, judged)
    whole, file = await written(Reader(made, judged), samples)
    size = len(file.getvalue())
    writer, file = await written(Reader(made, judged), samples, most_bytes=size // 2)
    assert 0 < len(file.getvalue()) <= size // 2
    assert writer.saved == whole.saved[: len(writer.saved)]
    assert 0 < len(writer.saved) < SAMPLES
    again = RowStore.private("c#3", 32, 4096)
    found = await store_again(file, samples, 8, kept_in(again), inline)
    assert [row.name for row in found] == writer.saved, "a file with a bound is as good as any other"


async def test_a_part_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    made, judged = stores()
    samples = BatchRef(sampled(made, judged).rows[::2])
    for name, most in (("PART_ROWS", 2), ("PART_TOKENS", 20)):
        with monkeypatch.context() as patch:
            patch.setattr(row_file, name, most)
            reader = Reader(made, judged)
            writer, _ = await written(reader, samples)
            assert len(writer.saved) == len(samples)
            assert 3 <= reader.reads < len(samples) + (name == "PART_TOKENS")


@pytest.mark.parametrize("damage", ["short", "count", "length", "other"])
async def test_a_damaged_file_is_an_error(damage: str) -> None:
    made, judged = stores()
    samples = sampled(made, judged)
    _, file = await written(Reader(made, judged), samples)
    data = bytearray(file.getvalue())
    match damage:
        case "short":
            del data[-1]
        case "count":
            data[:4] = b"\xff" * 4
        case "length":
            data[4:12] = b"\x7f" * 8
        case "other":
            data[20:24] = b"\xc1" * 4
    with pytest.raises(WireError):
        await store_again(BytesIO(bytes(data)), samples, 8, kept_in(RowStore.private("c#3", 32, 4096)), inline)


def test_a_restored_row_may_have_the_columns_of_all_services(tmp_path: Path) -> None:
    columns = restored_columns(2, 3, 4)
    assert set(columns) >= {"prompt_ids", "text", "reference_logprobs", "values", "valued_at", "cost_valued_at"}
