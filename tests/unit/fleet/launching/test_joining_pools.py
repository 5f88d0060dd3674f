"""Hosts that join a run for services in pools, and for ranks: who may, and which GPU each worker gets."""

import asyncio
from dataclasses import replace

import pytest

from asyncrl.config.sections.device_pools import Device, DevicePool, Host
from asyncrl.errors import ConfigError
from asyncrl.protocols.rank_layout import Layout
from tests.unit.fleet.launching.test_joining import ECHO, Site, place, playing

GPUS = tuple(Device(f"cuda:{number}") for number in range(2))
IN_POOL = replace(ECHO, needed=3, pool=DevicePool("gpus", GPUS, ("h1", "h2")))


def test_workers_of_one_host_get_gpus_of_their_own_and_a_third_waits_for_another_host() -> None:
    async def play(here: Site) -> None:
        for name in ("h1a", "h1b", "h1aa"):
            here.host(name, gpus=2)
        workers = [await here.point.spawn(place(replica)) for replica in range(2)]
        assert [worker.spec.devices for worker in workers] == [("cuda:0",), ("cuda:1",)]
        third = asyncio.get_running_loop().create_task(here.point.spawn(place(2)))
        await asyncio.sleep(5)
        assert not third.done()
        here.host("h2", gpus=2)
        assert ((await third).host.name, (await third).spec.devices) == ("h2", ("cuda:0",))
        workers[0].kill()
        await workers[0].wait()
        again = await here.point.spawn(place(0, "b"))
        assert (again.host.name, again.spec.devices) == ("h1", ("cuda:0",))
        started = [worker.spec.devices for name in ("h1a", "h1b", "h1aa") for worker in here.hosts[name][1].workers]
        assert sorted(started) == [("cuda:0",), ("cuda:0",), ("cuda:1",)], "the host starts what the controller chose"

    playing(play, IN_POOL)


@pytest.mark.parametrize(
    ("host", "gpus", "says"),
    [
        ("h3", 2, "echo workers run in pool 'gpus', whose hosts are h1, h2, and this is h3"),
        ("h2", 1, "host h2 has cuda:0, and lacks cuda:1"),
        ("h2", 0, "host h2 has no GPU, and lacks cuda:0, cuda:1"),
    ],
)
def test_a_host_outside_the_pool_or_without_its_devices_is_refused(host: str, gpus: int, says: str) -> None:
    async def play(here: Site) -> None:
        with pytest.raises(ConfigError, match=says):
            await here.host(host, gpus=gpus)

    assert any(says in line for line in playing(play, IN_POOL))


@pytest.mark.parametrize(
    ("device", "gpus", "says"),
    [
        ("cuda", 0, "echo workers compute on cuda, and host h1 has no GPU"),
        ("cuda:1", 1, "echo workers compute on cuda:1, and host h1 has cuda:0: take a host that has it"),
        ("cuda", 1, ""),
        ("cuda:1", 2, ""),
        ("cpu", 0, ""),
    ],
)
def test_without_a_pool_a_host_without_the_device_is_refused(device: str, gpus: int, says: str) -> None:
    host = Host("h1", GPUS[:gpus])
    found = replace(ECHO, device=Device(device)).objection("echo", host)
    assert found.startswith(says)
    assert bool(found) == bool(says)


def test_the_ranks_of_a_replica_start_once_there_is_a_host_for_each() -> None:
    async def play(here: Site) -> None:
        ranks = [replace(place(0, f"r{number}"), rank=number, layout=Layout(dp=2)) for number in range(2)]
        here.host("h1")
        starting = [asyncio.ensure_future(here.point.spawn(each)) for each in ranks]
        await asyncio.sleep(5)
        assert not here.hosts["h1"][1].workers, "it would wait for the other rank"
        here.host("h2")
        workers = await asyncio.gather(*starting)
        assert {worker.host.name for worker in workers} == {"h1", "h2"}

    playing(play, replace(ECHO, needed=2))
