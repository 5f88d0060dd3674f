"""Hosts that join a run for services in pools, and for ranks: who may, and which GPU each worker gets."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from asyncrl.config.sections.device_pools import Device, DevicePool, Host
from asyncrl.errors import ConfigError
from asyncrl.protocols.rank_layout import Axis, Layout
from tests.unit.fleet.launching.sites import ECHO, Site, place, playing

GPUS = tuple(Device(f"cuda:{number}") for number in range(2))
IN_POOL = replace(ECHO, needed=3, pool=DevicePool("gpus", GPUS, ("h1", "h2")))


@playing(IN_POOL)
async def test_workers_of_one_host_get_gpus_of_their_own_and_a_third_waits_for_another_host(here: Site) -> None:
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


@pytest.mark.parametrize(
    ("host", "gpus", "says"),
    [
        ("h3", 2, "echo workers run in pool 'gpus', whose hosts are h1, h2, and this is h3"),
        ("h2", 1, "host h2 has cuda:0, and lacks cuda:1"),
        ("h2", 0, "host h2 has no GPU, and lacks cuda:0, cuda:1"),
    ],
)
@playing(IN_POOL)
async def test_a_host_outside_the_pool_or_without_its_devices_is_refused(
    here: Site, host: str, gpus: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        await here.host(host, gpus=gpus)
    assert any(says in line for line in here.said)


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


@playing(replace(ECHO, needed=2))
async def test_the_ranks_of_a_replica_start_once_there_is_a_host_for_each(here: Site) -> None:
    ranks = [replace(place(0, f"r{number}"), rank=number, layout=Layout(dp=2)) for number in range(2)]
    here.host("h1")
    starting = [asyncio.ensure_future(here.point.spawn(each)) for each in ranks]
    await asyncio.sleep(5)
    assert not here.hosts["h1"][1].workers, "it would wait for the other rank"
    here.host("h2")
    workers = await asyncio.gather(*starting)
    assert {worker.host.name for worker in workers} == {"h1", "h2"}


LAYOUTS = {"shards": Layout(shard=2, dp=2), "tensor": Layout(tp=2, dp=2), "sequence": Layout(sp=2, dp=2)}
FOUR = ["h1a", "h1b", "h2a", "h2b"]


@pytest.mark.parametrize(("seed", "axis"), [*enumerate(("shards", "tensor", "sequence", "tensor"))])
def test_consecutive_ranks_get_one_host_whoever_came_first(seed: int, axis: Axis) -> None:
    draw = Random(seed)
    arrival = draw.sample(FOUR, 4)
    asking = draw.sample(range(4), 4)
    in_pool = seed % 2 == 0

    @playing(replace(IN_POOL if in_pool else ECHO, needed=4))
    async def play(here: Site) -> None:
        for name in arrival:
            here.host(name, gpus=2)
            await asyncio.sleep(0.1)
        ranks = [replace(place(0, f"r{rank}"), rank=rank, layout=LAYOUTS[axis]) for rank in asking]
        started = await asyncio.gather(*map(here.point.spawn, ranks))
        hosts = {worker.spec.rank: worker.host.name for worker in started}
        assert [hosts[rank] for rank in range(4)] == ["h1", "h1", "h2", "h2"]
        if in_pool:
            assert sorted(worker.spec.devices for worker in started) == [("cuda:0",)] * 2 + [("cuda:1",)] * 2
        (crossing,) = (line for line in here.said if "cross the network" in line)
        assert crossing.startswith("echo.layout.dp = 2: "), "the start says once what crosses"

    play()


@pytest.mark.parametrize("asking", [range(6), range(5, -1, -1), (5, 0, 3, 1, 4, 2), (2, 5, 1, 0, 3, 4)])
@playing(replace(ECHO, needed=6))
async def test_ranks_that_ask_in_any_order_get_the_places_that_are_best_for_all(
    here: Site, asking: Sequence[int]
) -> None:
    for name in ("h2a", "h1a", "h2b", "h1b", "h1aa", "h2aa"):
        here.host(name)
    await asyncio.sleep(5)
    ranks = [replace(place(0, f"r{rank}"), rank=rank, layout=Layout(shard=3, sp=2)) for rank in asking]
    started = await asyncio.gather(*map(here.point.spawn, ranks))
    hosts = {worker.spec.rank: worker.host.name for worker in started}
    assert [hosts[rank] for rank in range(6)] == ["h1", "h1", "h2", "h2", "h1", "h2"]


@playing(replace(IN_POOL, needed=4, pool=DevicePool("gpus", GPUS, ("h3", "h1", "h2"))))
async def test_ranks_lie_on_the_hosts_of_their_pool_in_its_order_and_leave_spares_alone(here: Site) -> None:
    for name in ("h3a", "h1a", "h2a", "h3b", "h1b", "h2b"):
        here.host(name, gpus=2)
    await asyncio.sleep(5)
    ranks = [replace(place(0, f"r{rank}"), rank=rank, layout=Layout(shard=2, dp=2)) for rank in range(4)]
    workers = await asyncio.gather(*map(here.point.spawn, ranks))
    assert [worker.host.name for worker in workers] == ["h3", "h3", "h1", "h1"]


@playing(IN_POOL)
async def test_hosts_with_more_offers_than_gpus_are_no_room_for_ranks(here: Site) -> None:
    for name in ("h1a", "h1b", "h1aa"):
        here.host(name, gpus=2)
    ranks = [replace(place(0, f"r{rank}"), rank=rank, layout=Layout(shard=3)) for rank in range(3)]
    starting = asyncio.gather(*map(here.point.spawn, ranks))
    await asyncio.sleep(5)
    assert not any(launcher.workers for _, launcher, _ in here.hosts.values()), "two of them would wait for the third"
    here.host("h2", gpus=2)
    assert [worker.host.name for worker in await starting] == ["h1", "h1", "h2"]
    assert any("shard = 3: its group of ranks crosses hosts (ranks 0 to 1 on h1" in line for line in here.said)


@playing(replace(IN_POOL, needed=2, planned=("h2", "h1")))
async def test_a_replica_takes_the_host_that_is_planned_for_it_where_that_one_waits(here: Site) -> None:
    for name in ("h1", "h2"):
        here.host(name, gpus=2)
    await asyncio.sleep(5)
    assert [(await here.point.spawn(place(replica))).host.name for replica in (0, 1)] == ["h2", "h1"]
