"""Hosts that join a run, on virtual time: both real ends over the in-process wire."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from asyncrl.errors import ConfigError, FleetFailed, PeerLost, Refused
from asyncrl.fleet.launching import joining_host
from asyncrl.fleet.launching.join_point import JoinPoint, Places, open_join_point
from asyncrl.fleet.launching.joined_worker import JoinedWorker
from asyncrl.fleet.launching.joining import joining_hello
from asyncrl.fleet.launching.joining_host import JoiningHost
from asyncrl.fleet.worker.worker_spec import Addresses, WorkerSpec
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.lanes.data.file_cache import FileCache
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.messages import Call
from asyncrl.simulation import virtual_loop
from tests.unit.fleet.fake_workers import FakeProcess, spec_of

ADDRESS = "inproc://joining"
DEADLINE = 100.0
TIMEOUT = 30.0
VERSIONS = {"asyncrl": "1", "torch": "2"}
ECHO = Places(needed=1, packages=("asyncrl", "torch"), command="asyncrl join echo")


@dataclass
class FakeLauncher:
    """Starts fake workers on a host."""

    host: HostId
    workers: list[FakeProcess] = field(default_factory=list)
    cleaned_up: list[str] = field(default_factory=list)

    async def spawn(self, spec: WorkerSpec) -> FakeProcess:
        addresses = Addresses(*(f"tcp://{self.host.name or 'host'}:{port}" for port in (1, 2, 3)))
        worker = FakeProcess(replace(spec, addresses=addresses))
        worker.labels = {"pid": 12}
        self.workers.append(worker)
        return worker

    def clean_up(self, spec: WorkerSpec) -> None:
        self.cleaned_up.append(spec.instance)


class Site:
    """A controller with its join point, and hosts."""

    def __init__(self, wire: InprocWire, point: JoinPoint, said: list[str]) -> None:
        self.wire = wire
        self.point = point
        self.said = said
        self.hosts: dict[str, tuple[JoiningHost, FakeLauncher, asyncio.Task[None]]] = {}

    def host(
        self,
        name: str,
        service: str = "echo",
        *,
        proof: str = "echo",
        torch: str = "2",
        drain: float = 0.0,
        gpus: int = 0,
    ) -> "asyncio.Task[None]":
        machine = name.rstrip("ab")  # h1a and h1b are on one machine.
        launcher = FakeLauncher(HostId(machine, name=machine))
        versions = VERSIONS | {"torch": torch}
        joining = JoiningHost(
            self.wire, ADDRESS, service, proof, launcher, asyncio.Event(), FileCache(Path("/nowhere"), print),
            timeout=TIMEOUT, say=self.said.append, host=launcher.host, versions=versions, drain=drain,
            gpus=[f"cuda:{number}" for number in range(gpus)],
        )  # fmt: skip
        task = asyncio.get_running_loop().create_task(joining.serve())
        self.hosts[name] = joining, launcher, task
        return task

    def worker(self, name: str) -> FakeProcess:
        return self.hosts[name][1].workers[-1]

    async def close(self) -> None:
        for _, _, task in self.hosts.values():
            task.cancel()
        await asyncio.wait([task for _, _, task in self.hosts.values()])


@asynccontextmanager
async def site(places: Places = ECHO) -> AsyncIterator[Site]:
    wire = InprocWire()
    said = list[str]()
    point = JoinPoint(
        ADDRESS, {"echo": places}, {"echo": "echo", "other": "reward"}.get, deadline=DEADLINE, report=said.append,
        versions=VERSIONS,
    )  # fmt: skip
    async with open_join_point(point, wire):
        here = Site(wire, point, said)
        yield here
    if here.hosts:
        await here.close()
    wire.close()


def playing(play: Callable[[Site], Awaitable[None]], places: Places = ECHO) -> list[str]:
    """Plays on virtual time; returns what both ends said."""

    async def main() -> list[str]:
        async with site(places) as here:
            await play(here)
        return here.said

    return virtual_loop.run(main())


def place(replica: int, instance: str = "a") -> WorkerSpec:
    return replace(spec_of(f"echo{replica}.0-0-{instance}"), replica=replica)


async def test_inproc_takes_the_first_of_two_listeners_only() -> None:
    async with site() as here:
        with pytest.raises(ConfigError, match=f"cannot listen at {ADDRESS}"):
            async with open_join_point(here.point, here.wire):
                pass


@pytest.mark.parametrize("wrong", ["ipc:///run/other", "tcp://h1:1?ab", "nonsense", "tcp://h1:1 "])
def test_an_address_to_which_the_controller_would_not_connect_is_refused(wrong: str) -> None:
    async def play(here: Site) -> None:
        here.host("h1")
        worker = await here.point.spawn(place(0))
        worker.started.clear()
        with pytest.raises(Refused, match="no address of a worker"):
            await here.point._started(worker.offer, Addresses("tcp://h1:1", "tcp://h1:2", wrong), {})
        assert not worker.started.is_set()

    playing(play)


def test_a_worker_runs_on_the_host_that_joins_and_is_ended_there() -> None:
    async def play(here: Site) -> None:
        here.host("h1")
        worker = await here.point.spawn(place(0))
        assert (worker.spec.addresses.control, worker.host.name, worker.labels) == ("tcp://h1:1", "h1", {"pid": 12})
        worker.kill()
        assert await worker.wait() == "ended (on h1)"
        assert here.worker("h1").requests == ["kill"]
        assert here.hosts["h1"][1].cleaned_up == [worker.spec.instance]
        assert not worker.has_left

    playing(play)


def test_a_host_whose_worker_died_runs_the_next_one() -> None:
    async def play(here: Site) -> None:
        here.host("h1")
        for instance in ("a", "b"):
            worker = await here.point.spawn(place(0, instance))
            here.worker("h1").die()
            assert await worker.wait() == "killed by SIGKILL (on h1)"

    playing(play)


def test_a_host_that_is_killed_is_known_by_its_connection_and_another_takes_its_place() -> None:
    async def play(here: Site) -> None:
        killed = here.host("h1")
        worker = await here.point.spawn(place(0))
        began = asyncio.get_running_loop().time()
        killed.cancel()
        assert await worker.wait() == "its host h1 is gone: no sign of life comes from it any more"
        assert asyncio.get_running_loop().time() - began < 10
        here.host("h2")
        assert (await here.point.spawn(place(0, "b"))).host.name == "h2"

    playing(play)


def test_a_host_that_is_to_leave_before_its_worker_takes_calls_ends_it_which_is_no_death() -> None:
    async def play(here: Site) -> None:
        task = here.host("h1")
        worker = await here.point.spawn(place(0))
        here.hosts["h1"][0].stop.set()
        assert "ended" in await worker.wait()
        assert worker.has_left
        await task
        assert here.worker("h1").requests == ["kill"]

    assert "h1 leaves before echo0.0-0-a takes calls" in playing(play)


@pytest.mark.parametrize("controller_stops_it", [True, False])
def test_the_worker_of_a_host_that_is_to_leave_drains_for_its_time(controller_stops_it: bool) -> None:
    async def play(here: Site) -> None:
        loop = asyncio.get_running_loop()
        told = list[tuple[str, float]]()
        here.point.retire = lambda instance, seconds: not told.append((instance, seconds))
        task = here.host("h1", drain=20.0)
        worker = await here.point.spawn(place(0))
        began = loop.time()
        here.hosts["h1"][0].stop.set()
        await asyncio.sleep(5)
        assert told == [("echo0.0-0-a", 20.0)]
        assert not here.worker("h1").dead
        if controller_stops_it:
            worker.stop()
        await task
        assert here.worker("h1").requests == ["stop"]
        assert (loop.time() - began < 6) == controller_stops_it
        assert loop.time() - began < 23

    assert "h1 leaves; echo0.0-0-a finishes what it has, within 20 s" in playing(play)


def test_the_worker_that_writes_the_last_checkpoint_is_left_the_time_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining_host, "ONE_REPLICA", ("echo",))

    async def play(here: Site) -> None:
        here.point.retire = lambda instance, seconds: True
        task = here.host("h1", drain=20.0)
        worker = await here.point.spawn(place(0))
        here.hosts["h1"][0].stop.set()
        await asyncio.sleep(200)
        assert not here.worker("h1").dead
        worker.stop()
        await task
        assert here.worker("h1").requests == ["stop"]

    playing(play)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_no_worker_drains_for_a_time_that_is_none(seconds: float) -> None:
    async def play(here: Site) -> None:
        here.point.retire = lambda instance, seconds: pytest.fail("it is refused")
        here.host("h1")
        await here.point.spawn(place(0))
        (agent,) = here.point._offers
        leaving = here.point.dispatch(Call(0, "leaving", (agent, seconds), 1.0))
        with pytest.raises(Refused, match="a worker drains for 0 to 3600 s"):
            await cast(Awaitable[None], leaving)

    playing(play)


def test_a_host_that_is_told_twice_to_leave_ends_its_worker_at_once() -> None:
    async def play(here: Site) -> None:
        here.point.retire = lambda instance, seconds: True
        task = here.host("h1", drain=20.0)
        worker = await here.point.spawn(place(0))
        here.hosts["h1"][0].stop.set()
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        task.cancel()  # As StopSignals does at the second signal.
        await worker.wait()
        assert asyncio.get_running_loop().time() - began < 1
        assert worker.has_left
        assert here.worker("h1").requests == ["stop"]

    playing(play)


def test_the_end_of_a_run_has_hosts_leave() -> None:
    async def play(here: Site) -> None:
        here.host("h1")
        worker = await here.point.spawn(place(0))
        worker.stop()
        await worker.wait()

    assert f"the run at {ADDRESS} has ended" in playing(play)


def test_a_run_says_who_is_missing_and_how_to_start_it() -> None:
    async def play(here: Site) -> None:
        here.host("h1")
        first, second = [here.point.spawn(place(replica)) for replica in (0, 1)]
        await first
        with pytest.raises(FleetFailed, match=r"1 of 2 echo workers have not joined .* within 100 s.*join echo"):
            await second

    playing(play, replace(ECHO, needed=2))


def test_a_place_beyond_the_needed_ones_waits_for_ever_and_takes_a_host_last() -> None:
    async def play(here: Site) -> None:
        loop = asyncio.get_running_loop()
        beyond = loop.create_task(here.point.spawn(place(1)))
        needed = loop.create_task(here.point.spawn(place(0)))
        await asyncio.sleep(DEADLINE / 2)
        here.host("h1")
        assert (await needed).host.name == "h1"
        await asyncio.sleep(3 * DEADLINE)
        assert not beyond.done()
        here.host("h2")
        assert (await beyond).host.name == "h2"

    playing(play)


def test_a_service_that_has_lost_all_hosts_ends_the_run_after_the_deadline() -> None:
    async def play(here: Site) -> None:
        task = here.host("h1")
        worker = await here.point.spawn(place(0))
        task.cancel()
        await worker.wait()
        with pytest.raises(FleetFailed, match="1 of 1 echo workers"):
            await here.point.spawn(place(0, "b"))

    playing(play)


def test_a_host_more_than_places_waits_as_a_spare() -> None:
    async def play(here: Site) -> None:
        here.host("h1")
        worker = await here.point.spawn(place(0))
        here.host("h2")
        await asyncio.sleep(1)
        worker.offer.is_leaving = True
        here.worker("h1").die()
        assert (await here.point.spawn(place(0, "b"))).host.name == "h2"

    assert "all echo workers are there: h2 waits as a spare" in playing(play)


@pytest.mark.parametrize(
    ("service", "proof", "torch", "why"),
    [
        ("reward", "echo", "2", "no reward workers join this run, and echo workers do"),
        ("echo", "other", "2", "the key of h1 is of reward workers: give it a key of echo workers"),
        ("echo", "revoked", "2", "the key of h1 is not admitted, or no more"),
        ("echo", "echo", "3", "controller has torch 2, and host h1 has torch 3: install the same versions on both"),
    ],
)
def test_a_host_that_does_not_fit_is_refused_with_both_sides_named(
    service: str, proof: str, torch: str, why: str
) -> None:
    async def play(here: Site) -> None:
        with pytest.raises(ConfigError, match=f"refuses this host: .*{why}"):
            await here.host("h1", service, proof=proof, torch=torch)

    assert any(why in line for line in playing(play))


@pytest.mark.parametrize("proof", ["echo", "other"])
@pytest.mark.parametrize("of_stranger", ["x" * 100_000, "h1\nasyncrl: the run failed", "h1\u2028failed", "h1\x1b[2J"])
def test_what_a_stranger_calls_itself_is_one_word_of_a_line(of_stranger: str, proof: str) -> None:
    async def play(here: Site) -> None:
        with pytest.raises(ConfigError, match="refuses this host"):
            await here.host(of_stranger, proof=proof, torch=of_stranger)

    (refusal,) = [line for line in playing(play) if " may not join as " in line]
    assert refusal.isprintable()
    assert len(refusal) < 600


def test_another_protocol_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    other = "asyncrl.fleet.launching.joining_host.joining_hello"
    monkeypatch.setattr(other, lambda *args: replace(joining_hello(*args), protocol=7))

    async def play(here: Site) -> None:
        with pytest.raises(ConfigError, match=r"protocol \d+ refuses .*protocol 7: another protocol\. Install"):
            await here.host("h1")

    playing(play)


def test_a_host_gives_up_when_no_run_is_there() -> None:
    async def main() -> float:
        wire = InprocWire()
        said = list[str]()
        launcher = FakeLauncher(HostId("h1"))
        cache = FileCache(Path("/nowhere"), said.append)
        host = JoiningHost(
            wire, ADDRESS, "echo", "echo", launcher, asyncio.Event(), cache, timeout=TIMEOUT, say=said.append
        )
        with pytest.raises(FleetFailed, match=f"no run was reached at {ADDRESS} for 30 s"):
            await host.serve()
        wire.close()
        return asyncio.get_running_loop().time()

    assert TIMEOUT < virtual_loop.run(main()) < 2 * TIMEOUT


def test_a_host_that_cannot_start_a_worker_is_left_out() -> None:
    async def play(here: Site) -> None:
        async def fail(spec: WorkerSpec) -> FakeProcess:
            raise OSError("no more processes")

        task = here.host("h1")
        here.hosts["h1"][1].spawn = fail  # type: ignore[method-assign]
        spawn = asyncio.get_running_loop().create_task(here.point.spawn(place(0)))
        with pytest.raises(OSError, match="no more processes"):
            await task
        here.host("h2")
        with pytest.raises(PeerLost, match="h1 did not start echo0"):
            await spawn
        assert (await here.point.spawn(place(0, "b"))).host.name == "h2"

    assert any(line.startswith("h1 did not start echo0.0-0-a: its host h1 is gone") for line in playing(play))


def test_a_spawn_that_is_cancelled_leaves_nothing_running() -> None:
    async def play(here: Site) -> None:
        here.host("h1")
        worker: JoinedWorker = await here.point.spawn(place(0))
        worker.kill()
        await worker.wait()
        spawn = asyncio.get_running_loop().create_task(here.point.spawn(place(0, "b")))
        await asyncio.sleep(0)
        spawn.cancel()
        await asyncio.wait([spawn])
        await asyncio.sleep(5)
        assert all(each.dead for each in here.hosts["h1"][1].workers)

    playing(play)
