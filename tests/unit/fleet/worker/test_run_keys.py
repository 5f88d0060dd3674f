"""On TCP each worker has a key pair of its own, and reaches what its role needs of others, and nothing else."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from asyncrl.concurrency import running_beside
from asyncrl.config.sources import load
from asyncrl.errors import DeadlineExceeded, PeerLost
from asyncrl.fleet.worker.lane_access import (
    ADMIT,
    PROMPT,
    RETRY,
    Introductions,
    admit_on,
    controller_keys,
    pair_of_instance,
    weights_address,
    worker_keys,
)
from asyncrl.fleet.worker.worker_spec import Addresses, RunFacts, WorkerSpec
from asyncrl.lanes.control.auth import CurveKeys, split_key, with_key
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.zmq_wire import ZmqWire
from tests.unit.fleet.fake_workers import FACTS, spec_of
from tests.virtual_time import on_virtual_time

MAKE_ROWS = ("generation", "evaluation", "environment", "reference", "critic", "cost_critic", "reward", "cost")
ROLES = ("training", *MAKE_ROWS)
OF_SAMPLES = ("generation", "evaluation", "environment")
READS = {
    "training": MAKE_ROWS,
    "critic": MAKE_ROWS,
    "cost_critic": MAKE_ROWS,
    "generation": OF_SAMPLES,
    "evaluation": OF_SAMPLES,
    "environment": OF_SAMPLES,
    "reward": OF_SAMPLES,
    "cost": OF_SAMPLES,
    "reference": OF_SAMPLES,
}
"""Role -> roles whose rows it reads, written down here once more."""
TAKES_WEIGHTS = ("generation", "evaluation")
SENDS_WEIGHTS = ("training", "generation", "evaluation")


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


def spec_on_tcp(role: str, facts: RunFacts) -> WorkerSpec:
    spec = spec_of(f"{role}0.0-0-a")
    return replace(spec, service=role, facts=facts, addresses=free_addresses(), curve=pair_of_instance(facts))


@dataclass
class Running:
    """A worker that answers on each of its lanes. at: their addresses, as others know them. told: set whenever it takes
    a list of callers."""

    spec: WorkerSpec
    wire: ZmqWire
    at: Mapping[str, str]
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.admit = admit_on(self.wire, self.spec)

    async def call(self, method: str, args: tuple[Any, ...], deadline: float) -> None:
        """Takes the call of its controller."""
        assert method == ADMIT
        self.admit(*args)
        self.told.set()


@asynccontextmanager
async def running(spec: WorkerSpec) -> AsyncIterator[Running]:
    async def answer() -> str:
        return "done"

    with closing(ZmqWire(worker_keys(spec))) as wire:
        here = spec.addresses
        listens = {
            "control": here.control,
            "work": here.work,
            "data": here.data,
            "weights": weights_address(spec),
        }
        servers = {lane: Server(wire.listen(each), lambda call: answer(), spec.hello) for lane, each in listens.items()}
        async with running_beside({lane: server.serve() for lane, server in servers.items()}):
            yield Running(spec, wire, {lane: server.listener.address for lane, server in servers.items()})


async def reached(wire: ZmqWire, owner: Running) -> list[str]:
    """Returns the lanes on which a holder of the keys of this wire is answered."""
    found = []
    for lane, address in owner.at.items():
        with suppress(PeerLost):
            async with Client(wire.connect(address), owner.spec.hello, "a worker") as client:
                assert await client.call("step", (), 5.0) == "done"
                found.append(lane)
    return found


async def test_each_role_reaches_what_it_needs_of_each_other_and_nothing_else() -> None:
    _, facts = controller_keys(facts_on("tcp"))
    introductions = Introductions()
    async with AsyncExitStack() as scope:
        workers = [await scope.enter_async_context(running(spec_on_tcp(role, facts))) for role in ROLES]
        for worker in workers:
            await introductions.add(worker.spec, worker)
        for reader in workers:
            for owner in workers:
                role = reader.spec.service
                of = owner.spec.service
                expected = ["data"] if of in READS[role] else []
                expected += ["weights"] if role in TAKES_WEIGHTS and of in SENDS_WEIGHTS else []
                assert await reached(reader.wire, owner) == expected, f"{role} of {of}"


async def test_a_worker_that_is_gone_is_refused_also_where_it_is_connected() -> None:
    keys, facts = controller_keys(facts_on("tcp"))
    introductions = Introductions()
    async with AsyncExitStack() as scope:
        owner = await scope.enter_async_context(running(spec_on_tcp("generation", facts)))
        leaving, staying = [
            await scope.enter_async_context(running(spec_on_tcp(role, facts))) for role in ("training", "reward")
        ]
        for worker in (owner, leaving, staying):
            await introductions.add(worker.spec, worker)
        clients = [
            await scope.enter_async_context(Client(each.wire.connect(owner.at["data"]), each.spec.hello, "the rows"))
            for each in (leaving, staying)
        ]
        for client in clients:
            assert await client.call("fetch", (), 5.0) == "done"
        async with running_beside({"callers": introductions.keep_current()}):
            owner.told.clear()
            introductions.remove(leaving.spec.instance)
            async with asyncio.timeout(60):
                await owner.told.wait()
        with pytest.raises(DeadlineExceeded):
            await clients[0].call("fetch", (), 0.3)
        assert await clients[1].call("fetch", (), 5.0) == "done"
        assert await reached(leaving.wire, owner) == []
        with closing(ZmqWire(keys)) as wire:
            assert await reached(wire, owner) == ["control", "work", "data", "weights"]


async def test_nobody_answers_in_the_place_of_another_worker() -> None:
    """A worker that took over an address has another key than the address names."""
    _, facts = controller_keys(facts_on("tcp"))
    true = spec_on_tcp("generation", facts)
    reader = spec_on_tcp("training", facts)
    false = replace(true, curve=pair_of_instance(facts))
    assert true.curve is not None
    async with running(false) as impostor, running(reader) as trainer:
        introductions = Introductions()
        for worker in (impostor, trainer):
            await introductions.add(worker.spec, worker)
        assert await reached(trainer.wire, impostor) == ["data"]
        impostor.at = {"data": with_key(true.addresses.data, true.curve[0])}
        assert await reached(trainer.wire, impostor) == []


async def test_no_worker_gets_the_secret_of_another_process() -> None:
    shared = facts_on("tcp")
    keys, facts = controller_keys(shared)
    specs = [spec_on_tcp("reward", facts) for _ in range(2)]
    assert keys is not None
    assert shared.curve is not None
    secrets = [keys.secret, shared.curve[1], *(spec.curve[1] for spec in specs if spec.curve)]
    assert len({*secrets}) == 4
    for number, spec in enumerate(specs):
        assert [secret in spec.to_json() for secret in secrets] == [False, False, number == 0, number == 1]
        assert not any(secret in repr(spec) for secret in secrets)


def test_an_address_names_its_key_and_what_is_none_is_refused() -> None:
    public = CurveKeys.fresh().public
    assert split_key(with_key("tcp://10.0.0.1:7", public)) == ("tcp://10.0.0.1:7", public)
    assert split_key("tcp://10.0.0.1:7") == ("tcp://10.0.0.1:7", "")
    with pytest.raises(PeerLost, match="no public key"):
        split_key("tcp://10.0.0.1:7?abc")


def test_processes_on_ipc_share_a_pair() -> None:
    facts = facts_on("ipc")
    keys, same = controller_keys(facts)
    assert same == facts
    assert pair_of_instance(facts) is None
    assert keys == worker_keys(replace(spec_of("training0.0-0-a"), facts=facts))


@dataclass
class Told:
    """The control lane of a worker that notes what it is told. fails: at its next calls."""

    keys: dict[str, set[str]] = field(default_factory=lambda: {"data": set(), "weights": set()})
    calls: int = 0
    named: int = 0
    fails: int = 0

    async def call(self, method: str, args: tuple[Any, ...], deadline: float) -> None:
        self.calls += 1
        await asyncio.sleep(0)
        if self.fails:
            self.fails -= 1
            raise DeadlineExceeded("late")
        for lane, (came, gone) in args[0].items():
            self.keys[lane] = self.keys[lane].union(came).difference(gone)
            self.named += len(came) + len(gone)


def member(role: str, number: int) -> WorkerSpec:
    return replace(spec_of(f"{role}{number}.0-0-a"), service=role, curve=(f"{role} {number}", "secret"))


async def test_workers_that_come_together_are_told_of_each_other_in_a_few_calls() -> None:
    count = 300
    introductions = Introductions()
    told = [Told() for _ in range(count)]
    specs = [member("generation", number) for number in range(count)]
    await asyncio.gather(*(introductions.add(spec, lane) for spec, lane in zip(specs, told, strict=True)))
    everybody = {f"generation {number}" for number in range(count)}
    assert all(lane.keys == {"data": everybody, "weights": everybody} for lane in told)
    assert sum(lane.calls for lane in told) <= 3 * count
    assert all(lane.named == 2 * count for lane in told), "each key is sent once"
    for spec in specs[: count // 2]:
        introductions.remove(spec.instance)
    before = sum(lane.calls for lane in told)
    await introductions.tell()
    assert sum(lane.calls for lane in told) - before == count - count // 2
    assert told[-1].keys["data"] == {spec.curve[0] for spec in specs[count // 2 :] if spec.curve}


@on_virtual_time
async def test_a_worker_that_missed_a_call_is_told_all_of_it_later() -> None:
    introductions = Introductions()
    late = Told()
    other = Told()
    async with running_beside({"callers": introductions.keep_current()}):
        await introductions.add(member("training", 0), late)
        late.fails = 2
        for number in range(3):
            await introductions.add(member("generation", number), other)
            introductions.remove(member("generation", 1).instance)
        await asyncio.sleep(3 * RETRY)
        assert late.keys["weights"] == {"generation 0", "generation 2"}
        await introductions.add(member("reward", 0), Told())
    assert other.keys["data"] >= {"training 0", "generation 0", "generation 2", "reward 0"}


@dataclass
class Stopped(Told):
    """The control lane of a worker that stands still until it goes on. began: set once a call came."""

    began: asyncio.Event = field(default_factory=asyncio.Event)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(self, method: str, args: tuple[Any, ...], deadline: float) -> None:
        self.began.set()
        try:
            async with asyncio.timeout(deadline):
                await self.goes_on.wait()
        except TimeoutError:
            raise DeadlineExceeded("no answer") from None
        await super().call(method, args, deadline)


@on_virtual_time
async def test_nobody_waits_for_a_worker_that_stands_still_and_it_is_told_all_when_it_goes_on() -> None:
    """On the virtual clock: newcomers start at most two seconds later, the second of them at once."""
    clock = asyncio.get_running_loop().time
    introductions = Introductions()
    lanes = [Told() for _ in range(4)]
    stopped = Stopped()
    stopped.goes_on.set()
    async with running_beside({"callers": introductions.keep_current()}):
        await introductions.add(member("generation", 0), stopped)
        stopped.goes_on.clear()
        waits = []
        for number, lane in enumerate(lanes):
            began = clock()
            await introductions.add(member("generation", 1 + number), lane)
            waits.append(clock() - began)
        assert waits[0] <= PROMPT
        assert waits[1:] == [0, 0, 0], "others know by then that it is late"
        introductions.remove(member("generation", 2).instance)
        await asyncio.sleep(100)
        assert [lane.keys["weights"] for lane in lanes[2:]] == [{f"generation {n}" for n in (0, 1, 3, 4)}] * 2
        stopped.goes_on.set()
        await asyncio.sleep(2 * RETRY)
        assert stopped.keys["weights"] == {f"generation {n}" for n in (0, 1, 3, 4)}
        stopped.goes_on.clear()
        stopped.began.clear()
        introductions.remove(member("generation", 0).instance)
        await asyncio.sleep(100)
        assert not stopped.began.is_set(), "one that is gone is told nothing"
