"""Hosts that lose their controller after any time in a run: it is stopped, cut off, killed, replaced or gone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from asyncrl.errors import ConfigError, FleetFailed, PeerLost
from asyncrl.fleet.launching import join_point
from asyncrl.fleet.launching.join_point import JoinPoint, open_join_point
from asyncrl.fleet.launching.joined_worker import JoinedWorker
from asyncrl.fleet.launching.joining_host import JoiningHost
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.control.auth import KEY_REFUSED
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import CallerSession, Server
from asyncrl.lanes.control.wire import InprocListener, InprocWire, Pipe
from asyncrl.lanes.data.file_cache import FileCache
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.messages import Call
from asyncrl.simulation import virtual_loop
from tests.unit.fleet.fake_workers import FakeProcess
from tests.unit.fleet.launching.test_joining import ADDRESS, ECHO, VERSIONS, FakeLauncher, place

TIMEOUT = 300.0
MINUTE = 60.0
DAY = 86400.0
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

    def point(self) -> JoinPoint:
        return JoinPoint(
            ADDRESS, {"echo": TWO}, lambda proof: proof, deadline=1e9, report=self.said.append, versions=VERSIONS
        )

    def join(self, name: str, timeout: float = TIMEOUT) -> None:
        launcher = FakeLauncher(HostId(name, name=name))
        joining = JoiningHost(
            *(self.wire, ADDRESS, "echo", "echo", launcher, asyncio.Event(), FileCache(Path("/nowhere"), print)),
            timeout=timeout,
            say=self.said.append,
            host=launcher.host,
            versions=VERSIONS,
            gpus=[],
        )
        self.hosts.append((joining, launcher, asyncio.get_running_loop().create_task(joining.serve())))

    async def workers(self, point: JoinPoint, instance: str) -> list[JoinedWorker]:
        return [await point.spawn(place(replica, instance)) for replica in range(2)]

    async def live(self, point: JoinPoint, instance: str, seconds: float) -> None:
        """Runs a controller with two workers that is killed after so many seconds."""
        async with open_join_point(point, self.wire):
            await self.workers(point, instance)
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


def playing(play: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with cluster() as here:
            await play(here)

    virtual_loop.run(main())


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


@pytest.mark.parametrize("life", [10.0, 30 * MINUTE])
@pytest.mark.parametrize("seconds", [5.0, 20.0, 60.0, 240.0])
def test_a_controller_that_stands_still_costs_no_worker(
    life: float, seconds: float, frozen: Callable[[float], Awaitable[None]]
) -> None:
    async def play(here: Cluster) -> None:
        point = here.point()
        async with open_join_point(point, here.wire):
            workers = await here.workers(point, "a")
            await asyncio.sleep(life)
            await frozen(seconds)
            await asyncio.sleep(20)
            assert here.left == []
            assert [worker.has_ended for worker in workers] == [False, False]
            assert here.started == [1, 1]
            assert [launcher.workers[0].requests for _, launcher, _ in here.hosts] == [[], []]
            workers[0].kill()  # Whoever came back takes orders.
            assert "ended" in await workers[0].wait()
            for worker in workers[1:]:
                worker.stop()

    playing(play)


@pytest.mark.parametrize("life", [10.0, 30 * MINUTE])
def test_a_connection_that_breaks_costs_no_worker(life: float) -> None:
    async def play(here: Cluster) -> None:
        point = here.point()
        async with open_join_point(point, here.wire):
            workers = await here.workers(point, "a")
            await asyncio.sleep(life)
            for _ in range(3):
                here.cut()
                await asyncio.sleep(10)
            assert (here.left, here.started) == ([], [1, 1])
            assert [worker.has_ended for worker in workers] == [False, False]
            assert sum("is back, with echo" in line for line in here.said) == 6
            workers[0].stop()
            assert await workers[0].wait() == "ended (on h1)"

    playing(play)


@pytest.mark.parametrize("away", [1.0, 30.0, 290.0])
@pytest.mark.parametrize("life", [10.0, 30 * MINUTE])
def test_hosts_join_the_controller_that_replaces_theirs(life: float, away: float) -> None:
    async def play(here: Cluster) -> None:
        for number in range(4):
            point = here.point()
            with pytest.raises(RuntimeError, match="killed"):
                await here.live(point, f"{number}", life)
            await asyncio.sleep(away)
            assert here.left == []
        assert here.started == [4, 4]
        assert all(each.dead for _, launcher, _ in here.hosts for each in launcher.workers[:-1])

    playing(play)


def test_a_worker_of_a_host_that_comes_back_too_late_is_ended_before_the_next_one_starts() -> None:
    async def play(here: Cluster) -> None:
        point = here.point()
        async with open_join_point(point, here.wire):
            worker, _ = await here.workers(point, "a")
            here.hosts[0][0].resolve = unreachable
            here.cut()
            assert await worker.wait() == "its host h1 is gone: no sign of life comes from it any more"
            assert not here.hosts[0][1].workers[0].dead
            await asyncio.sleep(30)
            here.hosts[0][0].resolve = reachable
            again = await point.spawn(place(0, "b"))
            assert here.hosts[0][1].workers[0].requests == ["stop"]
            assert (again.host.name, again.has_ended, here.started) == ("h1", False, [2, 1])

    playing(play)


async def reachable(address: str) -> str:
    return address


async def unreachable(address: str) -> str:
    raise ConfigError(f"no way to {address}")


def test_an_order_to_a_host_that_is_away_ends_its_worker_for_the_run() -> None:
    async def play(here: Cluster) -> None:
        point = here.point()
        async with open_join_point(point, here.wire):
            worker, _ = await here.workers(point, "a")
            here.cut()
            await asyncio.sleep(1.1)
            await asyncio.sleep(0)
            worker.offer.is_away = True
            worker.kill()
            assert await worker.wait() == "its host h1 is gone: its connection broke"

    playing(play)


def test_an_order_that_was_lost_with_the_connection_is_given_again() -> None:
    async def play(here: Cluster) -> None:
        point = here.point()
        async with open_join_point(point, here.wire):
            worker, _ = await here.workers(point, "a")
            here.cut()
            worker.stop()  # The controller does not know yet.
            assert await worker.wait() == "ended (on h1)"

    playing(play)


@pytest.mark.parametrize("what", ["host", "proof", "instance"])
def test_nobody_takes_over_the_worker_of_another_host(what: str) -> None:
    async def play(here: Cluster) -> None:
        point = here.point()
        async with open_join_point(point, here.wire):
            worker, other = await here.workers(point, "a")
            former = worker.offer
            offer = other.offer
            other.offer.worker = None
            offer.host = former.host
            offer.proof = former.proof
            assert offer.may_follow(former, worker.spec.instance)
            changed = {"host": HostId("h3", name="h1"), "proof": "another"}
            if what != "instance":
                setattr(offer, what, changed[what])
            name = worker.spec.instance if what != "instance" else "echo0.0-0-b"
            assert not offer.may_follow(former, name)

    playing(play)


@pytest.mark.parametrize("life", [0.0, 10.0, 30 * MINUTE])
def test_the_time_without_a_controller_begins_when_its_connection_is_lost(life: float) -> None:
    async def play(here: Cluster) -> None:
        loop = asyncio.get_running_loop()
        point = here.point()
        with pytest.raises(RuntimeError, match="killed"):
            await here.live(point, "a", life)
        began = loop.time()
        await asyncio.wait([task for _, _, task in here.hosts])
        assert TIMEOUT < loop.time() - began < TIMEOUT + 30
        assert all(isinstance(error, FleetFailed) for error in here.left)
        assert all(launcher.workers[0].requests == ["stop"] for _, launcher, _ in here.hosts)

    playing(play)


def test_a_host_that_starts_a_worker_as_the_run_ends_leaves_with_it() -> None:
    async def play(here: Cluster) -> None:
        async def slow(spec: WorkerSpec) -> FakeProcess:
            await asyncio.sleep(20.0)
            raise AssertionError("its run has ended")

        for _, launcher, _ in here.hosts:
            launcher.spawn = slow  # type: ignore[method-assign]
        async with open_join_point(point := here.point(), here.wire):
            starting = asyncio.create_task(point.spawn(place(0, "a")))
            await asyncio.sleep(5.0)
            starting.cancel()
        ended = asyncio.get_running_loop().time()
        await asyncio.wait([task for _, _, task in here.hosts])
        assert asyncio.get_running_loop().time() - ended < join_point.FAREWELL + 1.0, "none waits for another run"
        assert here.left == [None, None]
        assert [text for text in here.said if "has ended" in text] == [f"the run at {ADDRESS} has ended"] * 2

    playing(play)


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


def scripted(*script: str, timeout: float = TIMEOUT) -> tuple[BaseException, int, float]:
    """Returns the error with which a host ends, its tries, and when."""

    async def main() -> tuple[BaseException, int, float]:
        launcher = FakeLauncher(HostId("h1"))
        host = ScriptedHost(
            *(InprocWire(), ADDRESS, "echo", "echo", launcher, asyncio.Event(), FileCache(Path("/nowhere"), print)),
            timeout=timeout,
            say=lambda text: None,
        )
        host.script = iter(script)
        with pytest.raises((ConfigError, FleetFailed)) as raised:
            await host.serve()
        return raised.value, host.tries, asyncio.get_running_loop().time()

    return virtual_loop.run(main())


def test_failed_handshakes_are_counted_for_one_controller() -> None:
    error, tries, _ = scripted(*("works", "refused") * 5, *("refused",) * 2)
    assert (type(error), tries) == (ConfigError, 12), "three in a row are of a wrong key"
    error, tries, _ = scripted(*("refused", "refused", "gone") * 5, "refused", "refused", "refused")
    assert (type(error), tries) == (ConfigError, 18)
    error, _, ended = scripted(*("works", "refused") * 5)
    assert isinstance(error, FleetFailed)
    assert 5 * DAY + TIMEOUT < ended < 5 * DAY + TIMEOUT + 30


def test_a_host_that_stood_still_itself_tries_again() -> None:
    error, tries, ended = scripted("still", "works")
    assert isinstance(error, FleetFailed)
    assert tries > 2
    assert 2 * DAY + TIMEOUT < ended < 2 * DAY + TIMEOUT + MINUTE + 1
