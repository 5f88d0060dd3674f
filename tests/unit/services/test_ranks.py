"""What rank 0 begins, all ranks do in its order: whoever asks for it, gives up, or loses rows."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.rank_mesh import Announcements, RankMesh, Ranks
from asyncrl.errors import LostRows, PeerLost
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.control.message_codec import decode
from asyncrl.services.ranks import LedRanks, agreed

PATIENCE = 20.0
RANKS = 3
Stores = list[TCPStore]


@pytest.fixture
def stores() -> Stores:
    """Two connections for each rank."""
    wait = timedelta(seconds=PATIENCE)
    first = TCPStore("127.0.0.1", 0, None, True, wait, wait_for_workers=False)
    others = [
        TCPStore("127.0.0.1", first.port, None, False, wait, wait_for_workers=False) for _ in range(2 * RANKS - 1)
    ]
    return [first, *others]


def ends_of(stores: Stores, wait: float) -> list[Announcements]:
    pairs = enumerate(zip(stores[:RANKS], stores[RANKS:], strict=True))
    return [Announcements(*pair, rank, RANKS, wait) for rank, pair in pairs]


def test_every_reader_gets_each_message_in_order_and_removes_it(stores: Stores) -> None:
    first, *others = ends_of(stores, PATIENCE)
    messages = [("values", (1, "a")), ("advance", ()), ("copy", ({"version": 3},))]
    for message in messages:
        first.tell(message)
    keys = stores[0].num_keys()
    for reader in others:
        assert [reader.next() for _ in messages] == messages
    assert stores[0].num_keys() == keys - 2 * len(messages)


def test_a_reader_asks_again_when_nothing_was_announced_for_long(stores: Stores) -> None:
    first, other, _ = ends_of(stores, 0.01)
    assert not other._is_there("1/1")
    first.tell(("values", ()))
    assert other.next() == ("values", ())


def test_waits_end_when_the_first_rank_or_the_own_one_ends(stores: Stores) -> None:
    first, *others = ends_of(stores, PATIENCE)
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(reader.next) for reader in others]
        others[0].end()
        assert waits[0].result(PATIENCE) is None
        first.end()
        assert waits[1].result(PATIENCE) is None


class InterruptedStore:
    """Has another thread tell something after the first key of a message, and gives it time to do so."""

    def __init__(self) -> None:
        self.written: dict[str, bytes] = {}
        self.interrupt: Callable[[], None] | None = None
        self.threads: list[threading.Thread] = []

    def set(self, key: str, letters: bytes) -> None:
        assert key not in self.written, "no message is lost"
        self.written[key] = letters
        if self.interrupt is not None:
            self.threads.append(threading.Thread(target=self.interrupt))
            self.interrupt = None
            self.threads[0].start()
            self.threads[0].join(0.2)


def test_the_end_is_told_after_what_another_thread_tells() -> None:
    store: Any = InterruptedStore()
    first = Announcements(store, store, 0, RANKS, PATIENCE)
    store.interrupt = lambda: first.tell("end")
    first.tell("step")
    store.threads[0].join(PATIENCE)
    told = {key: decode([letters]) for key, letters in store.written.items()}
    assert told == {"1/1": "step", "2/1": "step", "1/2": "end", "2/2": "end"}


class SecondRank(Ranks):
    rank = 1
    size = 2


class Group:
    """Ranks whose work is noted, and exchanges twice, so that ranks in different orders would wait for each other."""

    def __init__(self, contexts: list[WorkerContext], meshes: list[RankMesh]) -> None:
        self.done: list[list[str]] = [[] for _ in meshes]
        self.begun = asyncio.Event()
        works = [
            {"note": self._noting(*each), "lose": self._losing(*each)}
            for each in enumerate(zip(contexts, meshes, strict=True))
        ]
        self.ranks = [LedRanks(*each) for each in zip(contexts, meshes, works, strict=True)]

    def _noting(self, rank: int, ends: tuple[WorkerContext, RankMesh]) -> Any:
        context, mesh = ends

        async def note(text: str) -> str:
            self.begun.set()
            for _ in range(2):
                found = await context.compute.run(mesh.everyone.told_by_each, text)
                self.done[rank].append("".join(found))
            return text

        return note

    def _losing(self, rank: int, ends: tuple[WorkerContext, RankMesh]) -> Any:
        context, mesh = ends

        async def read(losers: list[int]) -> None:
            if rank in losers:
                raise LostRows("mine", [("shm://rows", rank)])

        async def lose(losers: list[int]) -> None:
            await agreed(context, mesh, read(losers))

        return lose


Serving = Callable[..., AbstractAsyncContextManager[Group]]


@pytest.fixture
def serving(
    worker_context: Callable[..., WorkerContext],
    thread_ranks: Callable[[int], list[RankMesh]],
    stores: Stores,
) -> Serving:
    @asynccontextmanager
    async def serve() -> AsyncIterator[Group]:
        config = Config.model_validate({"model": {"name": "tiny"}, "task": {"prompts": "none"}})
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            meshes = [
                replace(mesh, announcements=end)
                for mesh, end in zip(thread_ranks(RANKS), ends_of(stores, PATIENCE), strict=True)
            ]
            contexts = [
                worker_context("critic", config, tasks, rank=mesh.rank, make_compute=ThreadCompute) for mesh in meshes
            ]
            group = Group(contexts, meshes)
            try:
                yield group
            finally:
                await asyncio.gather(*(each.stop() for each in group.ranks))
                for context in contexts:
                    context.compute.close()

    return serve


async def test_all_ranks_do_the_same_in_one_order(serving: Serving) -> None:
    async with serving() as group:
        first, *others = group.ranks
        assert (first.follows, [each.follows for each in others]) == (False, [True, True])
        texts = [str(number) for number in range(20)]
        assert await asyncio.gather(*(first.run("note", text) for text in texts)) == texts
        for each in others:
            await each.idle()
        assert group.done[0] == [3 * text for text in texts for _ in range(2)]
        assert group.done == [group.done[0]] * RANKS


async def test_work_that_has_begun_goes_on_without_its_caller(serving: Serving) -> None:
    async with serving() as group:
        caller = asyncio.create_task(group.ranks[0].run("note", "a"))
        await group.begun.wait()
        caller.cancel()
        assert await group.ranks[0].run("note", "b") == "b"
        assert group.done[0] == ["aaa", "aaa", "bbb", "bbb"]


async def test_rows_that_any_rank_lost_are_named_and_the_ranks_go_on(serving: Serving) -> None:
    async with serving() as group:
        first = group.ranks[0]
        with pytest.raises(LostRows, match="another rank of the training lost rows of its share") as failed:
            await first.run("lose", [1, 2])
        assert failed.value.places == (("shm://rows", 1), ("shm://rows", 2))
        await first.run("lose", [])
        assert await first.run("note", "a") == "a"


async def test_a_rank_ends_when_the_first_one_is_gone(
    worker_context: Callable[..., WorkerContext], stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(Announcements):
        def next(self) -> Any:
            raise torch.distributed.DistNetworkError("connection reset")

    monkeypatch.setattr("asyncrl.services.ranks.DEATH_NOTICE", 0.0)
    config = Config.model_validate({"model": {"name": "tiny"}, "task": {"prompts": "none"}})
    mesh = RankMesh(everyone=SecondRank(), announcements=Gone(stores[0], stores[1], 1, 2, PATIENCE))
    with pytest.raises(ExceptionGroup) as failed:
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            LedRanks(worker_context("critic", config, tasks, rank=1), mesh, {})
    assert failed.group_contains(PeerLost, match="rank 0 announces nothing any more: connection reset")
