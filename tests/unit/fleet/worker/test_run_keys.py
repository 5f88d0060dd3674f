"""On TCP only the controller calls workers; workers reach each other's rows, and nothing else of each other."""

import socket
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from dataclasses import replace

import pytest

from asyncrl.concurrency import running_beside
from asyncrl.config.sources import load
from asyncrl.errors import PeerLost
from asyncrl.fleet.worker.run_keys import controller_keys, worker_keys
from asyncrl.fleet.worker.worker_spec import Addresses, RunFacts, WorkerSpec
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.zmq_wire import ZmqWire
from tests.unit.fleet.fake_workers import FACTS, spec_of


def facts_on(wire: str) -> RunFacts:
    keys = CurveKeys.fresh()
    config = load("quickstart", flags=["--fleet.wire", wire]).config
    return replace(FACTS, config=config, curve=(keys.public, keys.secret))


def free_addresses() -> Addresses:
    sockets = [socket.socket() for _ in range(3)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    found = Addresses(*(f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in sockets))
    for each in sockets:
        each.close()
    return found


@pytest.fixture
async def run() -> AsyncIterator[tuple[CurveKeys, WorkerSpec]]:
    """The keys of the controller, and a worker that listens on all lanes."""
    keys, facts = controller_keys(facts_on("tcp"))
    spec = replace(spec_of("training0.0-0-a"), facts=facts, addresses=free_addresses())
    assert keys is not None

    async def answer() -> str:
        return "done"

    with closing(ZmqWire(worker_keys(spec))) as wire:
        addresses = (spec.addresses.control, spec.addresses.work, spec.addresses.data)
        servers = [Server(wire.listen(address), lambda call: answer(), spec.hello) for address in addresses]
        async with running_beside({server.listener.address: server.serve() for server in servers}):
            yield keys, spec


async def reached(keys: CurveKeys | None, spec: WorkerSpec) -> list[str]:
    """The lanes on which a holder of these keys is answered."""
    found = []
    with closing(ZmqWire(keys)) as wire:
        for lane in ("control", "work", "data"):
            with suppress(PeerLost):
                async with Client(wire.connect(getattr(spec.addresses, lane)), spec.hello, "the trainer") as client:
                    assert await client.call("step", (), 5.0) == "done"
                    found.append(lane)
    return found


async def test_the_controller_calls_a_worker_on_all_lanes(run: tuple[CurveKeys, WorkerSpec]) -> None:
    keys, spec = run
    assert await reached(keys, spec) == ["control", "work", "data"]


async def test_a_worker_reaches_the_rows_of_another_one_and_calls_nothing(run: tuple[CurveKeys, WorkerSpec]) -> None:
    _, spec = run
    other = WorkerSpec.from_json(replace(spec, service="reward", addresses=free_addresses()).to_json())
    assert await reached(worker_keys(other), spec) == ["data"]


async def test_the_secret_of_the_controller_is_in_no_specification(run: tuple[CurveKeys, WorkerSpec]) -> None:
    keys, spec = run
    assert keys.public in spec.to_json()
    assert keys.secret not in spec.to_json()


def test_processes_on_ipc_share_a_pair() -> None:
    facts = facts_on("ipc")
    keys, same = controller_keys(facts)
    assert same == facts
    assert keys == worker_keys(replace(spec_of("training0.0-0-a"), facts=facts))
