import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import LostRows, Refused
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.data import row_reader
from asyncrl.lanes.data.row_reader import FETCH, ROWS_PER_FETCH, RowReader, serve_rows
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.lanes.shared_memory import segment_name
from asyncrl.protocols.batch import BatchRef, Column, Place, RowRef
from asyncrl.protocols.messages import PROTOCOL, Hello

SLOTS = 100
ROW_BYTES = 1024


def hello(service: str, instance: str) -> Hello:
    return Hello("aa", 1, service, 0, instance, PROTOCOL, "0.1")


@dataclass
class Owners:
    """Stores of rows that a reader can reach; `kind` says how."""

    kind: str
    wire: Any
    folder: Path
    tasks: asyncio.TaskGroup
    hosts: list[asyncio.Task[None]]

    def store(self, name: str) -> Any:
        if self.kind == "shm":
            return RowStore.shared(segment_name("aa", 1, name, "rows"), SLOTS, ROW_BYTES, self.folder)
        listener = self.wire.listen(f"inproc://{name}" if self.kind == "inproc" else f"ipc://{self.folder}/{name}")
        store = RowStore.private(f"{listener.address}#{name}", SLOTS, ROW_BYTES)
        host = Server(listener, serve_rows(store), hello("generation", name))
        self.hosts.append(self.tasks.create_task(host.serve(), name=f"data lane of {name}"))
        return store


@pytest.fixture(params=["shm", "ipc", "inproc"])
async def owners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Owners]:
    wire: Any = InprocWire() if request.param == "inproc" else ZmqWire()
    async with asyncio.TaskGroup() as tasks:
        made = Owners(request.param, wire, tmp_path_factory.mktemp("o"), tasks, [])
        yield made
        for host in made.hosts:
            host.cancel()
    assert all(end.closed for end in getattr(wire, "_endpoints", ()))
    wire.close()


@pytest.fixture
async def reader(owners: Owners) -> RowReader:
    """Entered by the test: its links live in the task that enters it."""
    return RowReader(owners.wire, hello("training", "training0.0"), directory=owners.folder)


def row(value: int, length: int) -> dict[str, Any]:
    return {"tokens": np.full(length, value, np.int32), "logprobs": np.full(length, value / 2, np.float32)}


def ref(member: int, *places: Place) -> RowRef:
    return RowRef(0, member, 0, 1, 3, 4, 0, 0, "stop", places)


async def test_rows_of_several_owners_come_in_the_order_asked_for(owners: Owners, reader: RowReader) -> None:
    stores = [owners.store("a"), owners.store("b")]
    reference = owners.store("c")
    rows = []
    for value in range(80):
        place = stores[value % 3 % 2].put(row(value, value % 5))
        rows.append(ref(value, place, reference.put({"reference": np.full(2, value, np.int64)})))
    order = [5, 3, 79, 0, 12, *range(20, 78)]
    async with reader:
        batch = await reader.read(BatchRef(tuple(rows)).take(order), ["logprobs", "reference", "tokens"])
        empty = await reader.read(BatchRef(()), ["tokens"])
    assert list(batch.columns) == ["logprobs", "reference", "tokens"]
    for number, value in enumerate(order):
        assert batch["tokens"][number].tolist() == [value] * (value % 5)
        assert batch["logprobs"][number].tolist() == [value / 2] * (value % 5)
        assert batch["reference"][number].tolist() == [value] * 2
    assert batch["tokens"].values.dtype == np.int32
    assert len(empty) == 0
    for store in (*stores, reference):
        store.close()


async def test_a_batch_is_the_readers_own(owners: Owners, reader: RowReader) -> None:
    store = owners.store("a")
    places = [store.put(row(1, 4)), store.put(row(2, 4))]
    async with reader:
        batch = await reader.read(BatchRef(tuple(ref(0, place) for place in places)), ["tokens"])
        store.free(places)
        for _ in range(SLOTS):
            store.put(row(9, 4))
        assert batch["tokens"].values.tolist() == [1] * 4 + [2] * 4
    store.close()


async def test_freed_and_overwritten_rows_are_lost(owners: Owners, reader: RowReader) -> None:
    store = owners.store("a")
    kept = store.put(row(1, 4))
    freed = store.put(row(2, 4))
    async with reader:
        await reader.read(BatchRef((ref(0, kept), ref(1, freed))), ["tokens"])
        store.free([freed])
        with pytest.raises(LostRows, match="no longer holds"):
            await reader.read(BatchRef((ref(0, kept), ref(1, freed))), ["tokens"])
        for _ in range(SLOTS - 1):
            store.put(row(3, 4))
        with pytest.raises(LostRows):
            await reader.read(BatchRef((ref(1, freed),)), ["tokens"])
        assert len(await reader.read(BatchRef((ref(0, kept),)), ["tokens"])) == 1
    store.close()


async def test_a_column_that_a_row_does_not_have_is_named(owners: Owners, reader: RowReader) -> None:
    store = owners.store("a")
    async with reader:
        with pytest.raises(KeyError, match="no column 'values'"):
            await reader.read(BatchRef((ref(0, store.put(row(1, 4))),)), ["values"])
    store.close()


@pytest.mark.parametrize("owner", ["nonsense", "tcp://h1", "tcp://127.0.0.1:1?00"])
async def test_rows_at_an_impossible_address_are_lost(owner: str, tmp_path: Path) -> None:
    wire = ZmqWire(CurveKeys.fresh())
    async with RowReader(wire, hello("training", "training0.0"), directory=tmp_path) as reader:
        with pytest.raises(LostRows, match="is gone"):
            await reader.read(BatchRef((ref(0, Place(f"{owner}#x", 0, 1, ("tokens",))),)), ["tokens"])
    wire.close()


async def test_rows_of_an_owner_that_is_gone_are_lost(
    owners: Owners, reader: RowReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_reader, "OWNER_DEADLINE", 0.1)
    store = owners.store("a")
    refs = BatchRef((ref(0, store.put(row(1, 4))),))
    async with reader:
        await reader.read(refs, ["tokens"])
        store.close()
        for host in owners.hosts:
            host.cancel()
        if owners.hosts:
            await asyncio.wait(owners.hosts, timeout=60)
        with pytest.raises(LostRows):
            await reader.read(refs, ["tokens"])


async def test_a_successor_at_the_same_address_is_not_asked(owners: Owners, reader: RowReader) -> None:
    store = owners.store("a")
    place = store.put(row(1, 4))
    other = Place(place.owner + "-older", place.slot, place.write_count, place.columns)
    async with reader:
        with pytest.raises(LostRows, match="is gone"):
            await reader.read(BatchRef((ref(0, other),)), ["tokens"])
        assert len(await reader.read(BatchRef((ref(0, place),)), ["tokens"])) == 1
    store.close()


@pytest.mark.parametrize("owner", ["shm://../../etc/passwd", "shm://", "shm://asyncrl-none", "inproc://nobody"])
async def test_an_owner_that_never_was_is_lost(owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_reader, "OWNER_DEADLINE", 0.05)
    async with RowReader(InprocWire(), hello("training", "t"), directory=tmp_path) as reader:
        with pytest.raises(LostRows, match="is gone"):
            await reader.read(BatchRef((ref(0, Place(owner, 0, 2, ("tokens",))),)), ["tokens"])


async def test_rows_that_change_while_they_are_copied_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RowStore.shared(segment_name("aa", 1, "a", "rows"), SLOTS, ROW_BYTES, tmp_path)
    place = store.put(row(1, 4))
    join = Column.of

    def join_while_it_is_freed(rows: Any) -> Any:
        store.free([place])
        return join(rows)

    monkeypatch.setattr(Column, "of", join_while_it_is_freed)
    async with RowReader(InprocWire(), hello("training", "t"), directory=tmp_path) as reader:
        with pytest.raises(LostRows, match="no longer holds"):
            await reader.read(BatchRef((ref(0, place),)), ["tokens"])
    store.close()


async def test_viewed_rows_are_views_and_lost_when_they_change_inside_the_block(tmp_path: Path) -> None:
    store = RowStore.shared(segment_name("aa", 1, "a", "rows"), SLOTS, ROW_BYTES, tmp_path)
    place = store.put(row(1, 4))
    refs = BatchRef((ref(0, place),))
    async with RowReader(InprocWire(), hello("training", "t"), directory=tmp_path) as reader:
        async with reader.views(refs, ["tokens"]) as found:
            assert np.array_equal(found["tokens"][0], row(1, 4)["tokens"])
            assert not found["tokens"][0].flags.owndata
        with pytest.raises(LostRows, match="no longer holds"):
            async with reader.views(refs, ["tokens"]):
                store.free([place])
    store.close()


async def test_rows_that_change_while_their_owner_copies_them_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data lane looks at the slot a second time, after the copy; so does an owner that reads its own rows."""
    wire = InprocWire()
    store = RowStore.private("inproc://a#a", SLOTS, ROW_BYTES)
    first = store.put(row(1, 4))
    second = store.put(row(2, 4))
    views = store.views

    def views_of_what_is_freed(place: Place, columns: Any) -> Any:
        found = views(place, columns)
        store.free([place])
        return found

    monkeypatch.setattr(store, "views", views_of_what_is_freed)
    host = Server(wire.listen("inproc://a"), serve_rows(store), hello("generation", "a"))
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(host.serve())
        async with RowReader(wire, hello("training", "t")) as reader:
            with pytest.raises(LostRows, match="no longer holds"):
                await reader.read(BatchRef((ref(0, first),)), ["tokens"])
        serving.cancel()
    with pytest.raises(LostRows, match="no longer holds"):
        store.read(second, ["tokens"])


async def test_the_data_lane_answers_nothing_else() -> None:
    wire = InprocWire()
    store = RowStore.private("inproc://a#a", 1, 64)
    place = store.put({"x": np.zeros(1, np.float32)})
    host = Server(wire.listen("inproc://a"), serve_rows(store), hello("generation", "a"))
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(host.serve())
        async with Client(wire.connect("inproc://a"), hello("training", "t"), "generation0[0]") as link:
            with pytest.raises(Refused, match="answers fetch_rows"):
                await link.call("step", (1, 2), 5.0)
            slots = [place.slot]
            counts = [place.write_count]
            names = ["x"]
            for args in (
                (slots * (ROWS_PER_FETCH + 1), counts * (ROWS_PER_FETCH + 1), names, names),
                (slots * 2, counts, names, names),
                ([place], counts, names, names),
                (slots, [True], names, names),
                (slots, counts, names, [2]),
                (slots, counts, None, names),
            ):
                with pytest.raises(Refused, match="takes two lists of at most"):
                    await link.call(FETCH, args, 5.0)
        serving.cancel()


async def test_memory_of_a_dead_owner_is_freed_at_the_next_read(tmp_path: Path) -> None:
    """Its name is gone, but the kernel keeps memory that somebody maps."""
    owners = {name: RowStore.shared(segment_name("aa", 1, name, "rows"), SLOTS, ROW_BYTES, tmp_path) for name in "ab"}
    places = {name: store.put(row(1, 4)) for name, store in owners.items()}
    async with RowReader(InprocWire(), hello("training", "t"), directory=tmp_path) as reader:
        for place in places.values():
            await reader.read(BatchRef((ref(0, place),)), ["tokens"])
        owners["a"].close()
        assert mapped("aa-1-a.rows")
        await reader.read(BatchRef((ref(0, places["b"]),)), ["tokens"])
        assert not mapped("aa-1-a.rows")
        assert mapped("aa-1-b.rows")
    owners["b"].close()


def mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()
