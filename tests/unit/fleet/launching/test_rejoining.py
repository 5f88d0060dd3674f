"""Hosts that lose their controller after any time in a run: it is stopped, cut off, killed, replaced or gone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from asyncrl.errors import ConfigError, FleetFailed, PeerLost
from asyncrl.fleet.launching import join_point
from asyncrl.fleet.launching.join_point import JoinedWorker, JoinPoint, open_join_point
from asyncrl.fleet.launching.joining_host import JoiningHost
from asyncrl.lanes.control.auth import KEY_REFUSED
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import CallerSession, Server
from asyncrl.lanes.control.wire import InprocListener, InprocWire, Pipe
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.messages import Call
from tests.unit.fleet.launching.sites import ADDRESS, ECHO, VERSIONS, FakeLauncher, fake_host, place
from tests.virtual_time import on_virtual_time, within

TIMEOUT = 300.0
MINUTE = 60.0
DAY = 86400.0
LONG = 7 * MINUTE
"""A life that is longer than a host waits without a controller."""
TWO = replace(ECHO, needed=2)


class HeldPipe(Pipe[Any]):
    """Hands nothing over while its process stands still."""

    running = asyncio.Event()

    async def pump(self, handle: Callable[[Any], None]) -> None:
        while True:
            await self.running.wait()
            if self._items:
                handle(self._items.popleft())
            elif self.closed:
                raise PeerLost(f"{self.name} is closed")
            else:
                await self._arrived.wait()


def held_listener(address: str) -> InprocListener:
    listener = InprocListener(address)
    listener.inbox = HeldPipe(address)
    return listener


@dataclass
class Cluster:
    """Controllers, one after the other, and two hosts on virtual time."""

    wire: InprocWire
    said: list[str] = field(default_factory=list)
    hosts: list[tuple[JoiningHost, FakeLauncher, "asyncio.Task[None]"]] = field(default_factory=list)
    now: JoinPoint = field(init=False)

    def point(self) -> JoinPoint:
        return JoinPoint(ADDRESS, {"echo": TWO}, str, deadline=1e9, report=self.said.append, versions=VERSIONS)

    def join(self, name: str) -> None:
        joining, launcher = fake_host(self.wire, name, timeout=TIMEOUT, say=self.said.append)
        self.hosts.append((joining, launcher, asyncio.get_running_loop().create_task(joining.serve())))

    @asynccontextmanager
    async def running(self, instance: str = "a") -> AsyncIterator[list[JoinedWorker]]:
        """A controller, with its two workers."""
        async with open_join_point(self.point(), self.wire) as point:
            self.now = point
            yield [await point.spawn(place(replica, instance)) for replica in range(2)]

    async def live(self, instance: str, seconds: float) -> None:
        """Runs a controller with two workers that is killed after so many seconds."""
        with suppress(RuntimeError):
            async with self.running(instance):
                await asyncio.sleep(seconds)
                raise RuntimeError("killed")

    def cut(self) -> None:
        listener = self.wire._listeners[ADDRESS]
        for peer in list(listener._callers):
            listener.cut(peer)

    @property
    def started(self) -> list[int]:
        return [len(launcher.workers) for _, launcher, _ in self.hosts]

    @property
    def left(self) -> list[BaseException | None]:
        return [task.exception() for _, _, task in self.hosts if task.done()]


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    wire = InprocWire(held_listener)
    HeldPipe.running = asyncio.Event()
    HeldPipe.running.set()
    here = Cluster(wire)
    for name in ("h1", "h2"):
        here.join(name)
    yield here
    for _, _, task in here.hosts:
        task.cancel()
    await asyncio.wait([task for _, _, task in here.hosts])
    wire.close()


playing = within(cluster)


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Awaitable[None]]]:
    """Freezes the controller for so many seconds: it reads and sends nothing, and its own clocks do not run."""
    monkeypatch.setattr(join_point, "HEARTBEAT", None)
    start = Server._start

    def start_without_deadline(self: Server, tasks: asyncio.TaskGroup, session: CallerSession, call: Call) -> None:
        start(self, tasks, session, replace(call, deadline=1e9))

    monkeypatch.setattr(Server, "_start", start_without_deadline)

    async def freeze(seconds: float) -> None:
        monkeypatch.setattr(join_point, "SIGN_OF_LIFE", 1e9)
        await asyncio.sleep(2)  # The orders under way are the last ones.
        HeldPipe.running.clear()
        await asyncio.sleep(seconds)
        monkeypatch.setattr(join_point, "SIGN_OF_LIFE", 1.0)
        HeldPipe.running.set()

    return cast(Any, freeze)


@pytest.mark.parametrize(("life", "seconds"), [(10.0, 5.0), (10.0, 60.0), (LONG, 240.0)])
@playing
async def test_a_controller_that_stands_still_costs_no_worker(
    here: Cluster, life: float, seconds: float, frozen: Callable[[float], Awaitable[None]]
) -> None:
    async with here.running() as workers:
        await asyncio.sleep(life)
        await frozen(seconds)
        await asyncio.sleep(20)
        assert (here.left, here.started) == ([], [1, 1])
        assert [worker.has_ended for worker in workers] == [False, False]
        assert [launcher.workers[0].requests for _, launcher, _ in here.hosts] == [[], []]
        workers[0].kill()  # Whoever came back takes orders.
        assert "ended" in await workers[0].wait()
        workers[1].stop()


@playing
async def test_a_connection_that_breaks_costs_no_worker(here: Cluster) -> None:
    async with here.running() as workers:
        for _ in range(3):
            here.cut()
            await asyncio.sleep(10)
        assert (here.left, here.started) == ([], [1, 1])
        assert [worker.has_ended for worker in workers] == [False, False]
        assert sum("is back, with echo" in line for line in here.said) == 6
        workers[0].stop()
        assert await workers[0].wait() == "ended (on h1)"


@pytest.mark.parametrize(("life", "away"), [(10.0, 1.0), (10.0, 290.0), (LONG, 30.0)])
@playing
async def test_hosts_join_the_controller_that_replaces_theirs(here: Cluster, life: float, away: float) -> None:
    for number in range(3):
        await here.live(f"{number}", life)
        await asyncio.sleep(away)
        assert here.left == []
    assert here.started == [3, 3]
    assert all(each.dead for _, launcher, _ in here.hosts for each in launcher.workers[:-1])


@playing
async def test_a_worker_of_a_host_that_comes_back_too_late_is_ended_before_the_next_one_starts(here: Cluster) -> None:
    async with here.running() as (worker, _):
        here.hosts[0][0].resolve = unreachable
        here.cut()
        assert await worker.wait() == "its host h1 is gone: no sign of life comes from it any more"
        assert not here.hosts[0][1].workers[0].dead
        await asyncio.sleep(30)
        here.hosts[0][0].resolve = reachable
        again = await here.now.spawn(place(0, "b"))
        assert here.hosts[0][1].workers[0].requests == ["stop"]
        assert (again.host.name, again.has_ended, here.started) == ("h1", False, [2, 1])


async def reachable(address: str) -> str:
    return address


async def unreachable(address: str) -> str:
    raise ConfigError(f"no way to {address}")


@playing
async def test_an_order_to_a_host_that_is_away_ends_its_worker_for_the_run(here: Cluster) -> None:
    async with here.running() as (worker, _):
        here.cut()
        await asyncio.sleep(1.1)
        await asyncio.sleep(0)
        worker.offer.is_away = True
        worker.kill()
        assert await worker.wait() == "its host h1 is gone: its connection broke"


@playing
async def test_an_order_that_was_lost_with_the_connection_is_given_again(here: Cluster) -> None:
    async with here.running() as (worker, _):
        here.cut()
        worker.stop()  # The controller does not know yet.
        assert await worker.wait() == "ended (on h1)"


@playing
async def test_nobody_takes_over_the_worker_of_another_host(here: Cluster) -> None:
    async with here.running() as (worker, other):
        offer = other.offer
        offer.worker = None
        for changed in ({}, {"host": HostId("h3", name="h1")}, {"proof": "another"}):
            offer.host = worker.offer.host
            offer.proof = worker.offer.proof
            for name, value in changed.items():
                setattr(offer, name, value)
            assert offer.may_follow(worker.offer, worker.spec.instance) == (not changed)
            assert not offer.may_follow(worker.offer, "echo0.0-0-b")


@pytest.mark.parametrize("life", [0.0, LONG])
@playing
async def test_the_time_without_a_controller_begins_when_its_connection_is_lost(here: Cluster, life: float) -> None:
    await here.live("a", life)
    began = asyncio.get_running_loop().time()
    await asyncio.wait([task for _, _, task in here.hosts])
    assert TIMEOUT < asyncio.get_running_loop().time() - began < TIMEOUT + 30
    assert all(isinstance(error, FleetFailed) for error in here.left)
    assert all(launcher.workers[0].requests == ["stop"] for _, launcher, _ in here.hosts)


@playing
async def test_a_host_that_starts_a_worker_as_the_run_ends_leaves_with_it(here: Cluster) -> None:
    for _, launcher, _ in here.hosts:
        launcher.stuck = 20.0
    async with open_join_point(point := here.point(), here.wire):
        starting = asyncio.create_task(point.spawn(place(0, "a")))
        await asyncio.sleep(5.0)
        starting.cancel()
    ended = asyncio.get_running_loop().time()
    await asyncio.wait([task for _, _, task in here.hosts])
    assert asyncio.get_running_loop().time() - ended < join_point.FAREWELL + 1.0, "none waits for another run"
    assert (here.left, here.started) == ([None, None], [0, 0])
    assert [text for text in here.said if "has ended" in text] == [f"the run at {ADDRESS} has ended"] * 2


@dataclass(eq=False)
class ScriptedHost(JoiningHost):
    """A host whose tries to connect end as a script says: "works" for a day, is "refused" or finds it "gone", or
    stands still itself for a day."""

    script: Iterator[str] = field(default_factory=lambda: iter(()))
    tries: int = 0

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Client]:
        self.tries += 1
        match next(self.script, "gone"):
            case "works":
                yield cast(Any, None)
            case "refused":
                raise PeerLost(f"{ADDRESS} {KEY_REFUSED}")
            case "still":
                await asyncio.sleep(DAY)
                raise PeerLost("no answer")
            case _:
                raise PeerLost("the connection broke")

    async def _follow_orders(self, client: Client) -> None:
        await asyncio.sleep(DAY)
        raise PeerLost("the controller ended")


async def scripted(*script: str) -> tuple[BaseException, int, float]:
    """Returns the error with which a host ends, its tries, and after how long."""
    began = asyncio.get_running_loop().time()
    host, _ = fake_host(InprocWire(), kind=ScriptedHost, timeout=TIMEOUT)
    host.script = iter(script)
    with pytest.raises((ConfigError, FleetFailed)) as raised:
        await host.serve()
    return raised.value, host.tries, asyncio.get_running_loop().time() - began


@on_virtual_time
async def test_failed_handshakes_are_counted_for_one_controller() -> None:
    error, tries, _ = await scripted(*("works", "refused") * 5, *("refused",) * 2)
    assert (type(error), tries) == (ConfigError, 12), "three in a row are of a wrong key"
    error, tries, _ = await scripted(*("refused", "refused", "gone") * 5, "refused", "refused", "refused")
    assert (type(error), tries) == (ConfigError, 18)
    error, _, took = await scripted(*("works", "refused") * 5)
    assert isinstance(error, FleetFailed)
    assert 5 * DAY + TIMEOUT < took < 5 * DAY + TIMEOUT + 30


@on_virtual_time
async def test_a_host_that_stood_still_itself_tries_again() -> None:
    error, tries, took = await scripted("still", "works")
    assert isinstance(error, FleetFailed)
    assert tries > 2
    assert 2 * DAY + TIMEOUT < took < 2 * DAY + TIMEOUT + MINUTE + 1
