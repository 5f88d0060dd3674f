"""A trainer that is killed by the system in the middle of a transfer, over every transport that needs no device."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import DeadlineExceeded, PeerLost, Refused, WeightsError
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.shared_memory import SHARED_SCHEME, Segment
from asyncrl.lanes.weights.chunk_codec import WireCodec
from asyncrl.lanes.weights.transports import collective_transfer as pair_receiver
from asyncrl.lanes.weights.transports import weight_stream
from asyncrl.lanes.weights.transports.communicator import GlooBackend
from asyncrl.lanes.weights.transports.transport_ends import open_receiver
from asyncrl.lanes.weights.transports.version_transfer import ChunkPlan
from asyncrl.protocols.messages import Published
from tests.unit.lanes.weights.transports.faults import FaultyBackend
from tests.unit.lanes.weights.transports.killed_sender import KILLED
from tests.unit.lanes.weights.transports.sites import LIMIT, PairNetwork, hello, spec_of, take, until
from tests.unit.lanes.weights.transports.test_conformance import has

ERRORS = {
    "shm": WeightsError,
    "file": Refused,
    "tcp": (PeerLost, DeadlineExceeded),
    "gloo": (PeerLost, DeadlineExceeded),
}
"""Errors that a receiver gets. In shared memory and in a folder it finds a version that is being written."""

PARTS = ChunkPlan.of(spec_of("float32"), WireCodec.DENSE).parts


def start_trainer(folder: Path, keys: CurveKeys) -> "subprocess.Popen[str]":
    program = [sys.executable, "-m", "tests.unit.lanes.weights.transports.killed_sender"]
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([*program, str(folder), keys.public, keys.secret], text=True, **ends)


async def published_by(trainer: "subprocess.Popen[str]") -> dict[str, Published]:
    assert trainer.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(trainer.stdout.readline), LIMIT)
    return {name: Published(**values) for name, values in zip(KILLED, json.loads(line), strict=True)}


@asynccontextmanager
async def receivers_of(keys: CurveKeys, first: dict[str, Published]) -> AsyncIterator[dict[str, Any]]:
    pairs = FaultyBackend(GlooBackend("127.0.0.1"))
    wire = ZmqWire(keys)
    async with asyncio.TaskGroup() as tasks:
        ends = (wire, "tcp://127.0.0.1:*", hello("generation0"), tasks, WireCodec.DENSE)
        network = PairNetwork(*ends, pairs=pairs)
        found = {name: open_receiver(first[name], spec_of("float32"), lambda: network, "cpu") for name in KILLED}
        try:
            yield found
        finally:
            for receiver in found.values():
                receiver.close()
    wire.close()
    Segment.open(first["shm"].arena.removeprefix(SHARED_SCHEME)).unlink()


def in_transfer(receivers: dict[str, Any]) -> bool:
    """Returns whether a part has come over tcp and another one is waited for, and the pair waits."""
    incoming = receivers["tcp"]._incoming
    return incoming is not None and len(incoming.missing) == len(PARTS) - 1 and receivers["gloo"].backend.receiving > 0


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", CurveKeys]]:
    keys = CurveKeys.fresh()
    child = start_trainer(tmp_path, keys)
    yield child, keys
    child.kill()
    child.communicate()


async def test_a_trainer_that_is_killed_in_a_transfer_is_lost(
    trainer: tuple["subprocess.Popen[str]", CurveKeys], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_stream, "HELLO_DEADLINE", 0.5)
    monkeypatch.setattr(pair_receiver, "CALL_DEADLINE", 0.5)
    child, keys = trainer
    first = await published_by(child)
    async with receivers_of(keys, first) as receivers:
        before = {name: await take(receivers[name], first[name]) for name in KILLED}
        print("go on", file=child.stdin, flush=True)
        second = await published_by(child)
        fetching = {name: asyncio.ensure_future(take(receivers[name], second[name])) for name in KILLED}
        await until(lambda: in_transfer(receivers))
        child.kill()
        await asyncio.wait(fetching.values(), timeout=LIMIT)
        for name, error in ERRORS.items():
            with pytest.raises(error):
                await fetching[name]
        assert all(has(tensors, 0) for tensors in before.values())
