"""Reads from more owners, by more readers, than any fixed number would allow."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.deploy.process.local_launcher import WORKERS_DESCRIPTORS
from asyncrl.errors import LostRows, WireError
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.data.row_reader import CHUNKS_AT_ONCE, ROWS_PER_FETCH, RowReader, serve_rows
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.lanes.shared_memory import segment_name
from asyncrl.protocols.batch import Batch, BatchRef, Column, Place, RowRef
from asyncrl.protocols.messages import PROTOCOL, Call, Hello

OWNERS = 100
READS = 50


def hello(service: str, instance: str) -> Hello:
    return Hello("aa", 1, service, 0, instance, PROTOCOL, "0.1")


def ref(number: int, *places: Place, tokens: int = 4) -> RowRef:
    return RowRef(number, 0, 0, 1, 3, tokens, 0, 0, "stop", places)


class Fleet:
    """Owners of one row each, whose value is the number of the owner, in shared memory or behind a server each."""

    def __init__(self, wire: Any, tasks: asyncio.TaskGroup, folder: Path) -> None:
        self.wire = wire
        self.folder = folder
        self.stores: list[RowStore] = []
        self.servers: list[asyncio.Task[None]] = []
        self.answer: Callable[[int, Callable[[Call], Any]], Callable[[Call], Any]] = lambda _, dispatch: dispatch
        self._tasks = tasks

    def add(self, kind: str, count: int) -> BatchRef:
        """Adds owners; returns a reference to their rows."""
        rows = []
        for _ in range(count):
            number = len(self.stores)
            if kind == "shm":
                store = RowStore.shared(segment_name("aa", 1, f"o{number}", "rows"), 4, 64, self.folder)
            else:
                listener = self.wire.listen(f"{kind}://{self.folder if kind == 'ipc' else ''}/{number}")
                store = RowStore.private(f"{listener.address}#o{number}", 4, 64)
                dispatch: Any = self.answer(number, serve_rows(store))
                server = Server(listener, dispatch, hello("generation", f"o{number}"))
                self.servers.append(self._tasks.create_task(server.serve()))
            self.stores.append(store)
            rows.append(ref(number, store.put({"tokens": np.full(4, number, np.int32)})))
        return BatchRef(tuple(rows))

    def reader(self) -> RowReader:
        return RowReader(self.wire, hello("training", "t"), directory=self.folder)


@pytest.fixture(params=["inproc", "ipc"])
async def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    wire: Any = InprocWire() if request.param == "inproc" else ZmqWire()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        made = Fleet(wire, tasks, tmp_path_factory.mktemp("o"))
        yield made
        for server in made.servers:
            server.cancel()
        for store in made.stores:
            store.close()
    wire.close()


@pytest.fixture(params=["shm", "inproc"])
async def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def values(batch: Batch) -> list[int]:
    return batch["tokens"].values.reshape(-1, 4)[:, 0].tolist()


@pytest.mark.parametrize("fleet", ["inproc"], indirect=True)
async def test_one_read_takes_rows_of_all_owners(fleet: Fleet, kind: str) -> None:
    refs = fleet.add(kind, OWNERS)
    async with fleet.reader() as reader:
        for _ in range(2):
            assert values(await reader.read(refs, ["tokens"])) == list(range(OWNERS))
        assert len(reader._tables) + len(reader._fetcher.clients) == OWNERS, "all are kept for the next read"


@pytest.mark.parametrize("fleet", ["inproc"], indirect=True)
async def test_no_row_is_lost_to_other_reads_at_the_same_time(fleet: Fleet, kind: str) -> None:
    refs = fleet.add(kind, OWNERS)
    async with fleet.reader() as reader:
        reads = (
            reader.read(refs.take([(first + step) % OWNERS for step in range(8)]), ["tokens"]) for first in range(READS)
        )
        found = await asyncio.gather(*reads)
    assert [values(batch)[0] for batch in found] == [first % OWNERS for first in range(READS)]


async def test_an_owner_serves_a_hundred_readers_and_needs_few_descriptors_for_each(fleet: Fleet) -> None:
    refs = fleet.add("ipc" if isinstance(fleet.wire, ZmqWire) else "inproc", 1)
    before = open_files()
    async with AsyncExitStack() as readers:
        for _ in range(OWNERS):
            reader = await readers.enter_async_context(fleet.reader())
            assert values(await reader.read(refs, ["tokens"])) == [0]
        assert open_files() - before <= OWNERS * WORKERS_DESCRIPTORS


@pytest.mark.parametrize("fleet", ["inproc"], indirect=True)
async def test_a_mapped_owner_costs_the_reader_one_descriptor(fleet: Fleet) -> None:
    refs = fleet.add("shm", OWNERS)
    async with fleet.reader() as reader:
        before = open_files()
        await reader.read(refs, ["tokens"])
        assert open_files() - before == OWNERS


@pytest.mark.parametrize("fleet", ["inproc"], indirect=True)
async def test_all_owners_are_asked_for_all_chunks_before_the_first_has_answered(fleet: Fleet) -> None:
    barrier = asyncio.Barrier(7 + 3)

    def held(_: int, dispatch: Callable[[Call], Awaitable[Any]]) -> Callable[[Call], Awaitable[Any]]:
        async def answer(call: Call) -> Any:
            await barrier.wait()
            return await dispatch(call)

        return answer

    fleet.answer = held
    refs = fleet.add("inproc", 8)
    async with fleet.reader() as reader:
        wanted = [*range(7), *[7] * (2 * ROWS_PER_FETCH + 1)]
        assert values(await reader.read(refs.take(wanted), ["tokens"])) == wanted


@pytest.mark.parametrize("fleet", ["inproc"], indirect=True)
async def test_one_lost_owner_of_many_is_a_lost_row_and_the_others_are_read_on(fleet: Fleet, kind: str) -> None:
    refs = fleet.add(kind, OWNERS)
    fleet.stores[7].free(refs.rows[7].places)
    async with fleet.reader() as reader:
        with pytest.raises(LostRows, match="no longer holds"):
            await reader.read(refs, ["tokens"])
        others = [number for number in range(OWNERS) if number != 7]
        assert values(await reader.read(refs.take(others), ["tokens"])) == others


@pytest.mark.parametrize("fleet", ["inproc"], indirect=True)
async def test_an_answer_with_other_rows_or_columns_is_an_error_that_says_so(fleet: Fleet) -> None:
    answers = [Batch({}), Batch({"tokens": Column.of([])}), Batch({"text": Column.of([np.zeros(1, np.int32)])})]

    def other(number: int, dispatch: Callable[[Call], Any]) -> Callable[[Call], Any]:
        async def answer(call: Call) -> Batch:
            return answers[number]

        return answer

    fleet.answer = other
    refs = fleet.add("inproc", len(answers))
    async with fleet.reader() as reader:
        for number in range(len(answers)):
            with pytest.raises(WireError, match=r"rows of \[.*\] came for 1 of \('tokens',\)"):
                await reader.read(refs.take([number]), ["tokens"])


@pytest.mark.parametrize("fleet", ["inproc"], indirect=True)
async def test_connections_to_lost_owners_are_closed_when_another_one_opens(fleet: Fleet) -> None:
    refs = fleet.add("inproc", 3)
    async with fleet.reader() as reader:
        await reader.read(refs.take([0, 1]), ["tokens"])
        clients: dict[str, Client] = reader._fetcher.clients
        assert len(clients) == 2
        fleet.servers[0].cancel()
        await next(iter(clients.values())).lost.wait()
        await reader.read(refs.take([2]), ["tokens"])
        assert len(clients) == 2


@pytest.mark.parametrize("fleet", ["inproc"], indirect=True)
async def test_the_loop_goes_on_while_many_rows_are_joined_and_their_owner_may_end(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = fleet.add("shm", 1)
    other = fleet.add("shm", 1)
    large = BatchRef(tuple(ref(number, *refs.rows[0].places, tokens=1000) for number in range(200)))
    joining = threading.Event()
    go_on = threading.Event()
    join = Column.of
    threads = []

    def held(rows: Any) -> Any:
        threads.append(threading.get_ident())
        joining.set()
        assert len(rows) == 1 or go_on.wait(10)
        return join(rows)

    monkeypatch.setattr(Column, "of", held)
    async with fleet.reader() as reader:
        reading = asyncio.create_task(reader.read(large, ["tokens"]))
        await asyncio.to_thread(joining.wait, 10)
        fleet.stores[0].close()
        assert values(await reader.read(other, ["tokens"])) == [1]
        go_on.set()
        assert values(await reading) == [0] * 200
    assert threads[0] != threading.get_ident() == threads[1]


@pytest.mark.parametrize("fleet", ["inproc"], indirect=True)
async def test_a_reader_waits_for_a_bounded_number_of_chunks_at_once(fleet: Fleet) -> None:
    """More would only share the network, and wait longer within their deadline."""
    waiting: list[int] = []
    go_on = asyncio.Event()

    def held_up(number: int, dispatch: Callable[[Call], Any]) -> Callable[[Call], Any]:
        async def answer(call: Call) -> Any:
            waiting.append(number)
            if len(waiting) == CHUNKS_AT_ONCE:
                asyncio.get_running_loop().call_later(0.05, go_on.set)
            if not go_on.is_set():
                await go_on.wait()
                first.append(len(waiting))
            return await dispatch(call)

        return answer

    first: list[int] = []
    fleet.answer = held_up
    refs = fleet.add("inproc", 2 * CHUNKS_AT_ONCE)
    async with fleet.reader() as reader:
        rows = await reader.read(refs, ["tokens"])
    assert len(rows) == len(waiting) == 2 * CHUNKS_AT_ONCE
    assert first[0] == CHUNKS_AT_ONCE
