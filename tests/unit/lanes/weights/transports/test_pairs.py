"""Weights over pairs of ranks under faults: gloo for real, NCCL with a twin of its library."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import DeadlineExceeded, PeerLost, Refused, WeightsError
from asyncrl.lanes.weights.transports import version_transfer
from asyncrl.lanes.weights.transports.collective_transfer import CollectiveReceiver
from asyncrl.lanes.weights.transports.communicator import (
    GROUP_PARTS,
    RECEIVER,
    TRAINER,
    Backend,
    Communicator,
    GlooBackend,
    OwnerThread,
)
from asyncrl.lanes.weights.transports.nccl import NcclBackend
from asyncrl.protocols.messages import Published
from tests.unit.lanes.weights.transports.faults import TwinNccl
from tests.unit.lanes.weights.transports.sites import LIMIT, PAIRS, Site, open_site, take, until
from tests.unit.lanes.weights.transports.test_conformance import has

SMALL = 64 << 10
"""Bytes of a part with which a version takes eleven groups."""


@pytest.fixture(params=PAIRS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("weights ") and isinstance(thread, threading.Thread) and thread.daemon:
            thread.join(LIMIT)
            assert not thread.is_alive(), f"{thread.name} goes on after its end was closed"


def begin_stalled(site: Site, receiver: CollectiveReceiver, published: Published) -> "asyncio.Future[Any]":
    """Begins a fetch whose sender waits."""
    site.pairs.going.clear()
    return asyncio.ensure_future(receiver.fetch(published))


async def test_what_arrived_before_a_pair_broke_is_not_sent_again(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path, part_bytes=SMALL) as site:
        first = site.write(0)
        receiver = site.receiver(first, "generation0")
        site.pairs.sends = 5
        if transport == "nccl":
            asyncio.get_running_loop().call_later(0.1, lambda: site.nccl.fail("remote process exited"))
        assert has(await take(receiver, first), 0)
        assert site.pairs.sent == len(receiver.plan.parts)


async def test_a_receiver_that_gives_up_takes_the_next_version(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path, part_bytes=SMALL) as site:
        first = site.write(0)
        receiver = site.receiver(first, "generation0")
        before = await take(receiver, first)
        second = site.write(1)
        fetching = begin_stalled(site, receiver, second)
        await until(lambda: bool(site.sender._stored[-1].readers))
        given_up = receiver._incoming.block.data_ptr()
        await until(lambda: site.pairs.receiving > 0)
        fetching.cancel()
        await asyncio.wait([fetching])
        assert receiver._begin(second).block.data_ptr() != given_up, "the transfer may still write there"
        site.pairs.going.set()
        assert has(before, 0)
        assert has(await take(receiver, second), 1)
        assert has(await take(receiver, site.write(2)), 2)


async def test_of_versions_that_are_sent_the_oldest_ends_and_a_newer_is_refused(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path, part_bytes=SMALL) as site:
        first = site.write(0)
        receivers = [site.receiver(first, f"generation{number}") for number in range(2)]
        before = [await take(each, first) for each in receivers]
        fetching = []
        for receiver, version in zip(receivers, (1, 2), strict=True):
            slow = site.write(version)
            fetching.append(begin_stalled(site, receiver, slow))
            await until(lambda: bool(site.sender._stored[-1].readers))
        for version in (3, 4, 5):
            newest = site.write(version)
        site.pairs.going.set()
        await fetching[0]
        with pytest.raises((Refused, PeerLost)):
            await fetching[1]
        with pytest.raises(WeightsError):
            receivers[1].tensors(slow)
        parts = len(receivers[1].plan.parts)
        assert site.pairs.sent <= 3 * parts + GROUP_PARTS, "a version that is overwritten is sent no further"
        assert all(has(each, 0) for each in before)
        assert has(await take(receivers[1], newest), 5)


async def test_groups_that_each_come_in_time_must_come_in_that_of_the_version(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_site(transport, tmp_path) as site:
        first = site.write(0)
        receiver = site.receiver(first, "generation0")
        before = await take(receiver, first)
        second = site.write(1)
        monkeypatch.setattr(version_transfer, "START", 0.05)
        monkeypatch.setattr(version_transfer, "SLOWEST", 1e9)
        monkeypatch.setattr(receiver, "_receive", lambda *_: asyncio.Event().wait())
        with pytest.raises(DeadlineExceeded, match=r"(\d+) of \1 parts of the weights of version 1 did not come"):
            await receiver.fetch(second)
        assert has(before, 0)


async def test_bytes_that_changed_while_they_were_sent_are_refused(transport: str, tmp_path: Path) -> None:
    """All parts came, and only the confirmation tells that the block was written meanwhile."""
    async with open_site(transport, tmp_path) as site:
        first = site.write(0)
        receiver = site.receiver(first, "generation0")
        before = await take(receiver, first)
        second = site.write(1)
        held = site.sender._stored[-1]
        confirm = site.sender.confirm_version

        async def overwritten(incarnation: int, version: int) -> None:
            held.overwritten = True
            await confirm(incarnation, version)

        site.sender.confirm_version = overwritten
        with pytest.raises(Refused, match="not here"):
            await take(receiver, second)
        with pytest.raises(WeightsError):
            receiver.tensors(second)
        assert has(before, 0)


async def test_the_trainer_and_other_receivers_wait_for_no_slow_one(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path, part_bytes=SMALL) as site:
        first = site.write(0)
        slow, quick = (site.receiver(first, f"generation{number}") for number in range(2))
        for receiver in (slow, quick):
            assert has(await take(receiver, first), 0)
        stalled = site.write(1)
        fetching = begin_stalled(site, slow, stalled)
        await until(lambda: bool(site.sender._stored[-1].readers))
        site.pairs.stalled = {"weights to generation0"}
        site.pairs.going.set()
        for version in range(2, 8):
            assert has(await take(quick, site.write(version)), version)
        assert not fetching.done()
        site.pairs.stalled = set()
        await asyncio.wait([fetching])
        newest = site.write(8)
        assert has(await take(slow, newest), 8)


async def test_a_pair_that_cannot_connect_ends_in_its_deadline(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = NcclBackend(TwinNccl()) if transport == "nccl" else GlooBackend("127.0.0.1")
    thread = OwnerThread("weights alone")
    with pytest.raises(DeadlineExceeded, match="did not come"):
        await asyncio.wrap_future(thread.submit(lambda: backend.connect(backend.invite(), TRAINER, 0.1)))
    thread.close()
    backend.close()


@asynccontextmanager
async def connected(backend: Backend) -> AsyncIterator[list[tuple[Communicator, Callable[..., "asyncio.Future[Any]"]]]]:
    """Yields each end of a pair, with what runs work on its thread."""
    meeting = backend.invite()
    with ExitStack() as ends:
        threads = [ends.enter_context(closing(OwnerThread(f"weights {rank}"))) for rank in (TRAINER, RECEIVER)]
        on_thread = [lambda work, thread=thread: asyncio.wrap_future(thread.submit(work)) for thread in threads]
        connecting = [run(partial(backend.connect, meeting, rank, LIMIT)) for rank, run in enumerate(on_thread)]
        yield list(zip(await asyncio.gather(*connecting), on_thread, strict=True))
    backend.close()


@pytest.mark.parametrize("reason", ["remote process exited", "aborted"])
async def test_nccl_ends_a_transfer_that_fails_and_frees_its_communicator(reason: str) -> None:
    library = TwinNccl()
    async with connected(NcclBackend(library)) as ((sending, of_trainer), (receiving, of_receiver)):
        part = torch.zeros(10, dtype=torch.uint8)
        waiting = of_receiver(lambda: receiving.receive([part], LIMIT))
        await asyncio.sleep(0.01)
        if reason == "aborted":
            receiving.abort()
        else:
            library.fail(reason)
        with pytest.raises(PeerLost, match=reason):
            await waiting
        await of_trainer(sending.close)
        assert not library.leaked


async def test_no_communicator_of_nccl_is_left_open(tmp_path: Path) -> None:
    async with open_site("nccl", tmp_path) as site:
        first = site.write(0)
        for number in range(3):
            assert has(await take(site.receiver(first, f"generation{number}"), first), 0)
        site.sender.forget("generation1")
        nccl = site.nccl
    await until(lambda: not nccl.leaked)


def test_gloo_listens_where_it_was_told_to() -> None:
    backend = GlooBackend("127.0.0.1")
    first = backend.invite()
    second = backend.invite()
    assert first != second
    port = int(first.partition("/")[0].rpartition(":")[2])
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [row[1] for row in listening if row[1].endswith(f":{port:04X}") and row[3] == "0A"] == [
        f"0100007F:{port:04X}"
    ]
    everywhere = Path("/proc/net/tcp6").read_text() if Path("/proc/net/tcp6").exists() else ""
    assert f":{port:04X} 0000" not in everywhere
    backend.close()


KILLED = """
import os, signal, sys, torch
from asyncrl.lanes.weights.transports.communicator import GlooBackend
pair = GlooBackend("127.0.0.1").connect(sys.argv[1], 1, 30.0)
pair.receive([torch.empty(1 << 20, dtype=torch.uint8)], 30.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_in_a_transfer_ends_it_at_once() -> None:
    backend = GlooBackend("127.0.0.1")
    meeting = backend.invite()
    child = subprocess.Popen([sys.executable, "-c", KILLED, meeting])
    try:
        pair = backend.connect(meeting, TRAINER, 60.0)
        part = torch.zeros(1 << 20, dtype=torch.uint8)
        pair.send([part], 30.0)
        with pytest.raises(PeerLost, match="gone"):
            pair.send([part] * 200, 60.0)
    finally:
        child.kill()
        child.wait(LIMIT)
        backend.close()


async def test_a_pair_of_gloo_whose_peer_has_closed_is_lost_in_each_call() -> None:
    """gloo tells at first where it waits, and from then on where a part is posted."""
    async with connected(GlooBackend("127.0.0.1")) as ((sending, of_trainer), (receiving, of_receiver)):
        await of_trainer(sending.close)
        for move in (receiving.receive, receiving.receive, receiving.send):
            with pytest.raises(PeerLost, match="gone"):
                await of_receiver(partial(move, [torch.zeros(10, dtype=torch.uint8)], LIMIT))
        await of_receiver(receiving.close)


async def test_a_version_that_is_gone_costs_no_pair(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        old = site.write(0)
        for version in range(1, 5):
            site.write(version)
        with pytest.raises(Refused, match="not here"):
            await take(site.receiver(old, "generation0"), old)
        assert not site.sender._pairs


FREEING = """
import time
from asyncrl.lanes.weights.transports.communicator import OwnerThread
thread = OwnerThread("weights")
thread.submit(lambda: (time.sleep(0.05), print("freed")))
thread.close()
"""


def test_the_end_of_a_process_waits_for_a_communicator_that_is_freed() -> None:
    # Its start imports torch, which takes long where every core is busy.
    ended = subprocess.run(
        [sys.executable, "-c", FREEING], capture_output=True, text=True, timeout=6 * LIMIT, check=True
    )
    assert ended.stdout == "freed\n"


async def test_parts_that_are_cut_otherwise_are_refused(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        first = site.write(0)
        site.pairs.part_bytes = SMALL
        with pytest.raises(Refused, match="other parts"):
            await take(site.receiver(first, "generation0"), first)


async def test_wrong_calls_are_refused(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        first = site.write(0)
        receiver = site.receiver(first, "generation0")
        await take(receiver, first)
        (client,) = receiver.end.clients.values()
        for method, arguments in (("send_version", ("a", 1, 2, "b")), ("close", ()), ("join_pair", (1, 2))):
            with pytest.raises(Refused, match="answers"):
                await client.call(method, arguments, 5.0)
        with pytest.raises((Refused, PeerLost)):
            await client.call("send_version", (3, 0, 0, "unknown"), 5.0)
