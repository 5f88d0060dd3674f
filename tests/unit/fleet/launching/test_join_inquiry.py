"""A run tells hosts its state, and hosts find a controller with another address at each try; on virtual time."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.sections.device_pools import Device
from asyncrl.errors import ConfigError, FleetFailed
from asyncrl.fleet.launching.joining import HostState, state_of_host
from asyncrl.fleet.launching.joining_host import JoiningHost
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.lanes.data.file_cache import FileCache
from asyncrl.lanes.host_id import HostId
from asyncrl.simulation import virtual_loop
from tests.unit.fleet.fake_workers import FakeProcess
from tests.unit.fleet.launching.test_joining import ADDRESS, ECHO, TIMEOUT, VERSIONS, FakeLauncher, Site, place, playing


def asking(here: Site, name: str, proof: str = "echo", gpus: int = 0) -> Awaitable[HostState]:
    found = [f"cuda:{number}" for number in range(gpus)]
    return state_of_host(here.wire, ADDRESS, "echo", proof, HostId(name, name=name), VERSIONS, found)


def test_a_run_says_what_a_host_does_in_it() -> None:
    async def play(here: Site) -> None:
        task = here.host("h1")
        worker = await here.point.spawn(place(0))
        here.host("h2")
        await asyncio.sleep(1)
        states = [await asking(here, name) for name in ("h1", "h2", "h3")]
        assert states == [HostState.WORKS, HostState.WAITS, HostState.ABSENT]
        task.cancel()
        await worker.wait()
        assert await asking(here, "h1") == HostState.ABSENT

    playing(play)


def test_a_host_whose_worker_has_not_started_does_not_count_as_working() -> None:
    async def play(here: Site) -> None:
        never = asyncio.Event()

        async def hang(spec: WorkerSpec) -> FakeProcess:
            await never.wait()
            raise AssertionError(spec)

        here.host("h1")
        here.hosts["h1"][1].spawn = hang  # type: ignore[method-assign]
        spawn = asyncio.get_running_loop().create_task(here.point.spawn(place(0)))
        await asyncio.sleep(1)
        assert await asking(here, "h1") == HostState.STARTS
        spawn.cancel()
        await asyncio.wait([spawn])

    playing(play)


def test_only_a_key_of_the_role_may_ask() -> None:
    async def play(here: Site) -> None:
        with pytest.raises(ConfigError, match="the key of h1 is of reward workers"):
            await asking(here, "h1", proof="other")

    playing(play)


def test_a_host_asks_with_its_devices() -> None:
    async def play(here: Site) -> None:
        here.host("h1", gpus=1)
        await here.point.spawn(place(0))
        assert await asking(here, "h1", gpus=1) == HostState.WORKS
        with pytest.raises(ConfigError, match="compute on cuda:0, and host h1 has no GPU"):
            await asking(here, "h1")

    playing(play, replace(ECHO, device=Device("cuda:0")))


def test_asking_without_a_run_fails_in_time() -> None:
    async def main() -> float:
        wire = InprocWire()
        with pytest.raises(FleetFailed, match=f"no run answers at {ADDRESS}"):
            await state_of_host(wire, ADDRESS, "echo", "echo", HostId("h1"), VERSIONS, [])
        wire.close()
        return asyncio.get_running_loop().time()

    assert virtual_loop.run(main()) <= 10


def test_a_host_looks_its_controller_up_at_each_try() -> None:
    asked = list[str]()

    async def resolve(address: str) -> str:
        asked.append(address)
        if len(asked) == 1:
            raise ConfigError("there is no host controller")
        return "inproc://of-the-last-start" if len(asked) == 2 else ADDRESS

    async def play(here: Site) -> None:
        launcher = FakeLauncher(HostId("h1"))
        joining = JoiningHost(
            here.wire, "tcp://controller:7000", "echo", "echo", launcher, asyncio.Event(),
            FileCache(Path("/nowhere"), print), timeout=TIMEOUT, say=here.said.append, versions=VERSIONS,
            resolve=resolve,
        )  # fmt: skip
        here.hosts["h1"] = joining, launcher, asyncio.get_running_loop().create_task(joining.serve())
        await here.point.spawn(place(0))

    said = playing(play)
    assert asked == 4 * ["tcp://controller:7000"], "a failed look-up, a failed try, orders, files"
    assert "cannot reach the run at tcp://controller:7000: there is no host controller; trying for 30 s" in said
