"""Hosts that join a run, on virtual time: offers, orders, workers that start and end, and what a run says of them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import closing
from dataclasses import replace
from typing import cast

import pytest

from asyncrl.config.sections.device_pools import Device
from asyncrl.errors import ConfigError, FleetFailed, PeerLost, Refused
from asyncrl.fleet.launching import joining_host
from asyncrl.fleet.launching.join_point import open_join_point
from asyncrl.fleet.launching.joining import HostState, joining_hello, state_of_host
from asyncrl.fleet.worker.worker_spec import Addresses
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.messages import Call, JoinOrder, JoinRequest
from tests.unit.fleet.launching.sites import (
    ADDRESS,
    DEADLINE,
    ECHO,
    TIMEOUT,
    VERSIONS,
    Site,
    fake_host,
    place,
    playing,
    site,
)
from tests.virtual_time import on_virtual_time


async def test_inproc_takes_the_first_of_two_listeners_only() -> None:
    async with site() as here:
        with pytest.raises(ConfigError, match=f"cannot listen at {ADDRESS}"):
            async with open_join_point(here.point, here.wire):
                pass


@pytest.mark.parametrize("wrong", ["ipc:///run/other", "tcp://h1:1?ab", "nonsense", "tcp://h1:1 "])
@playing()
async def test_an_address_to_which_the_controller_would_not_connect_is_refused(here: Site, wrong: str) -> None:
    here.host("h1")
    worker = await here.point.spawn(place(0))
    worker.started.clear()
    with pytest.raises(Refused, match="no address of a worker"):
        await here.point._started(worker.offer, Addresses("tcp://h1:1", "tcp://h1:2", wrong), {})
    assert not worker.started.is_set()


@playing()
async def test_a_worker_runs_on_the_host_that_joins_and_is_ended_there(here: Site) -> None:
    here.host("h1")
    worker = await here.point.spawn(place(0))
    assert (worker.spec.addresses.control, worker.host.name, worker.labels) == ("tcp://h1:1", "h1", {"pid": 12})
    worker.kill()
    assert await worker.wait() == "ended (on h1)"
    assert here.worker("h1").requests == ["kill"]
    assert here.hosts["h1"][1].cleaned_up == [worker.spec.instance]
    assert not worker.has_left


@playing()
async def test_a_host_that_is_killed_is_known_by_its_connection_and_another_takes_its_place(here: Site) -> None:
    killed = here.host("h1")
    worker = await here.point.spawn(place(0))
    began = asyncio.get_running_loop().time()
    killed.cancel()
    assert await worker.wait() == "its host h1 is gone: no sign of life comes from it any more"
    assert asyncio.get_running_loop().time() - began < 10
    here.host("h2")
    assert (await here.point.spawn(place(0, "b"))).host.name == "h2"


@playing()
async def test_a_host_that_is_to_leave_before_its_worker_takes_calls_ends_it_which_is_no_death(here: Site) -> None:
    task = here.host("h1")
    worker = await here.point.spawn(place(0))
    here.hosts["h1"][0].stop.set()
    assert "ended" in await worker.wait()
    assert worker.has_left
    await task
    assert here.worker("h1").requests == ["kill"]
    assert "h1 leaves before echo0.0-0-a takes calls" in here.said


@pytest.mark.parametrize("controller_stops_it", [True, False])
@playing()
async def test_the_worker_of_a_host_that_is_to_leave_drains_for_its_time(here: Site, controller_stops_it: bool) -> None:
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
    assert "h1 leaves; echo0.0-0-a finishes what it has, within 20 s" in here.said


@playing()
async def test_the_worker_that_writes_the_last_checkpoint_is_left_the_time_for_it(
    here: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining_host, "ONE_REPLICA", ("echo",))
    here.point.retire = lambda instance, seconds: True
    task = here.host("h1", drain=20.0)
    worker = await here.point.spawn(place(0))
    here.hosts["h1"][0].stop.set()
    await asyncio.sleep(200)
    assert not here.worker("h1").dead
    worker.stop()
    await task
    assert here.worker("h1").requests == ["stop"]


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
@playing()
async def test_no_worker_drains_for_a_time_that_is_none(here: Site, seconds: float) -> None:
    here.point.retire = lambda instance, seconds: pytest.fail("it is refused")
    here.host("h1")
    await here.point.spawn(place(0))
    (agent,) = here.point._offers
    leaving = here.point.dispatch(Call(0, "leaving", (agent, seconds), 1.0))
    with pytest.raises(Refused, match="a worker drains for 0 to 3600 s"):
        await cast(Awaitable[None], leaving)


@playing()
async def test_a_host_that_is_told_twice_to_leave_ends_its_worker_at_once(here: Site) -> None:
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


@on_virtual_time
async def test_the_end_of_a_run_has_hosts_leave() -> None:
    async with site() as here:
        here.host("h1")
        worker = await here.point.spawn(place(0))
        worker.stop()
        await worker.wait()
    assert f"the run at {ADDRESS} has ended" in here.said


@playing(replace(ECHO, needed=2))
async def test_a_run_says_who_is_missing_and_how_to_start_it(here: Site) -> None:
    here.host("h1")
    first, second = [here.point.spawn(place(replica)) for replica in (0, 1)]
    await first
    with pytest.raises(FleetFailed, match=r"1 of 2 echo workers have not joined .* within 100 s.*join echo"):
        await second


@playing()
async def test_a_place_beyond_the_needed_ones_waits_for_ever_and_takes_a_host_last(here: Site) -> None:
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


@playing()
async def test_a_service_that_has_lost_all_hosts_ends_the_run_after_the_deadline(here: Site) -> None:
    task = here.host("h1")
    worker = await here.point.spawn(place(0))
    task.cancel()
    await worker.wait()
    with pytest.raises(FleetFailed, match="1 of 1 echo workers"):
        await here.point.spawn(place(0, "b"))


@pytest.mark.parametrize(
    ("service", "proof", "torch", "why"),
    [
        ("reward", "echo", "2", "no reward workers join this run, and echo workers do"),
        ("echo", "other", "2", "the key of h1 is of reward workers: give it a key of echo workers"),
        ("echo", "revoked", "2", "the key of h1 is not admitted, or no more"),
        ("echo", "echo", "3", "controller has torch 2, and host h1 has torch 3: install the same versions on both"),
    ],
)
@playing()
async def test_a_host_that_does_not_fit_is_refused_with_both_sides_named(
    here: Site, service: str, proof: str, torch: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"refuses this host: .*{why}"):
        await here.host("h1", service, proof=proof, torch=torch)
    assert any(why in line for line in here.said)


@pytest.mark.parametrize("proof", ["echo", "other"])
@pytest.mark.parametrize("of_stranger", ["x" * 100_000, "h1\nasyncrl: the run failed", "h1\u2028failed", "h1\x1b[2J"])
@playing()
async def test_what_a_stranger_calls_itself_is_one_word_of_a_line(here: Site, of_stranger: str, proof: str) -> None:
    with pytest.raises(ConfigError, match="refuses this host"):
        await here.host(of_stranger, proof=proof, torch=of_stranger)
    (refusal,) = [line for line in here.said if " may not join as " in line]
    assert refusal.isprintable()
    assert len(refusal) < 600


@playing()
async def test_another_protocol_is_refused_with_what_to_do(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining_host, "joining_hello", lambda *args: replace(joining_hello(*args), protocol=7))
    with pytest.raises(ConfigError, match=r"protocol \d+ refuses .*protocol 7: another protocol\. Install"):
        await here.host("h1")


@on_virtual_time
async def test_a_host_gives_up_when_no_run_is_there() -> None:
    with closing(InprocWire()) as wire, pytest.raises(FleetFailed, match=f"no run was reached at {ADDRESS} for 30 s"):
        await fake_host(wire)[0].serve()
    assert TIMEOUT < asyncio.get_running_loop().time() < 2 * TIMEOUT


@playing()
async def test_a_host_that_cannot_start_a_worker_is_left_out(here: Site) -> None:
    task = here.host("h1")
    here.hosts["h1"][1].spawn_error = OSError("no more processes")
    spawn = asyncio.get_running_loop().create_task(here.point.spawn(place(0)))
    with pytest.raises(OSError, match="no more processes"):
        await task
    here.host("h2")
    with pytest.raises(PeerLost, match="h1 did not start echo0"):
        await spawn
    assert (await here.point.spawn(place(0, "b"))).host.name == "h2"
    assert any(line.startswith("h1 did not start echo0.0-0-a: its host h1 is gone") for line in here.said)


@playing()
async def test_a_spawn_that_is_cancelled_leaves_nothing_running(here: Site) -> None:
    here.host("h1")
    worker = await here.point.spawn(place(0))
    worker.kill()
    await worker.wait()
    spawn = asyncio.get_running_loop().create_task(here.point.spawn(place(0, "b")))
    await asyncio.sleep(0)
    spawn.cancel()
    await asyncio.wait([spawn])
    await asyncio.sleep(5)
    assert all(each.dead for each in here.hosts["h1"][1].workers)


# ---- offers: each has a name of its own, and starts a worker in time or is left out ---------------------------------


@playing()
async def test_a_name_of_an_offer_is_taken_once(here: Site) -> None:
    request = JoinRequest("echo", "agent", "h1", "", "h1", VERSIONS, "echo")
    first, second = (
        cast(AsyncGenerator[JoinOrder, None], here.point.dispatch(Call(0, "join", (request,), 5.0))) for _ in range(2)
    )
    assert (await anext(first)).kind == "fetch"
    with pytest.raises(Refused, match="agent has joined already"):
        await anext(second)
    await first.aclose()


@playing()
async def test_a_host_that_starts_no_worker_in_time_is_left_out(here: Site) -> None:
    here.host("h1")
    here.hosts["h1"][1].stuck = 1e6
    with pytest.raises(PeerLost, match=r"h1 did not start echo0\.0-0-a: nothing came within 60 s"):
        await here.point.spawn(place(0))
    assert asyncio.get_running_loop().time() < 61


@playing()
async def test_a_spare_comes_before_a_host_at_which_a_worker_ended(here: Site) -> None:
    here.host("h1")
    first = await here.point.spawn(place(0))
    here.host("h2")
    await asyncio.sleep(1.0)
    assert "all echo workers are there: h2 waits as a spare" in here.said
    here.worker("h1").die("CUDA out of memory")
    assert await first.wait() == "CUDA out of memory (on h1)"
    second = await here.point.spawn(place(0, "b"))
    assert (first.host.name, second.host.name) == ("h1", "h2")
    here.worker("h2").die()
    await second.wait()
    assert (await here.point.spawn(place(0, "c"))).host.name == "h1", "there is no better one"


async def unable(here: Site, replica: int, name: str, why: str) -> None:
    """Has a host start a worker that cannot load, as the supervisor does."""
    worker = await here.point.spawn(place(replica, name))
    worker.give_up(why, has_run=False)
    worker.stop()
    await worker.wait()


@playing()
async def test_a_host_that_cannot_start_a_worker_loses_its_offer_after_three_tries_and_may_join_anew(
    here: Site,
) -> None:
    left = here.host("h1")
    for name in "abc":
        await unable(here, 0, name, "it could not start on h1: CUDA out of memory")
    with pytest.raises(ConfigError, match=r"h1 gets no echo worker any more, because 3 in a row .* out of memory"):
        await left
    here.host("h2")
    assert (await here.point.spawn(place(0, "d"))).host.name == "h2"
    here.host("h1")
    assert (await here.point.spawn(place(1, "e"))).host.name == "h1", "a host that joins again makes another offer"
    told = [text for text in here.said if text.startswith("h1 gets no echo worker any more")]
    assert len(told) == 1
    assert "CUDA out of memory. Mend that on h1, and start `" in told[0]
    assert told[0].endswith("join echo` there again")


@playing()
async def test_a_worker_that_took_calls_keeps_its_host_the_offer(here: Site) -> None:
    here.host("h1")
    for name in "abcdefg":
        worker = await here.point.spawn(place(0, name))
        worker.give_up("killed by SIGKILL", has_run=name in "cf")
        worker.stop()
        await worker.wait()
    assert (await here.point.spawn(place(0, "h"))).host.name == "h1"
    assert not any("gets no" in text for text in here.said)


@playing()
async def test_a_host_says_why_its_worker_was_ended(here: Site) -> None:
    here.host("h1")
    await unable(here, 0, "a", "echo0[0] raised ImportError: no lxml")
    why = "because the controller gave it up: echo0[0] raised ImportError: no lxml"
    assert f"echo0.0-0-a ended, {why}" in here.said


@playing()
async def test_a_worker_whose_host_is_gone_did_not_die_of_what_it_did(here: Site) -> None:
    for number, name in enumerate(("h1", "h2")):
        here.host(name)
        worker = await here.point.spawn(place(number))
        if name == "h1":
            here.hosts[name][2].cancel()
        else:
            here.worker(name).die()
        await worker.wait()
        assert worker.host_is_gone == (name == "h1")


# ---- a run says what a host does in it ------------------------------------------------------------------------------


def asking(here: Site, name: str, proof: str = "echo", gpus: int = 0) -> Awaitable[HostState]:
    found = [f"cuda:{number}" for number in range(gpus)]
    return state_of_host(here.wire, ADDRESS, "echo", proof, HostId(name, name=name), VERSIONS, found)


@playing()
async def test_a_run_says_what_a_host_does_in_it(here: Site) -> None:
    task = here.host("h1")
    worker = await here.point.spawn(place(0))
    here.host("h2")
    await asyncio.sleep(1)
    states = [await asking(here, name) for name in ("h1", "h2", "h3")]
    assert states == [HostState.WORKS, HostState.WAITS, HostState.ABSENT]
    task.cancel()
    await worker.wait()
    assert await asking(here, "h1") == HostState.ABSENT


@playing()
async def test_a_host_whose_worker_has_not_started_does_not_count_as_working(here: Site) -> None:
    here.host("h1")
    here.hosts["h1"][1].stuck = 1e6
    spawn = asyncio.get_running_loop().create_task(here.point.spawn(place(0)))
    await asyncio.sleep(1)
    assert await asking(here, "h1") == HostState.STARTS
    spawn.cancel()
    await asyncio.wait([spawn])


@playing()
async def test_only_a_key_of_the_role_may_ask(here: Site) -> None:
    with pytest.raises(ConfigError, match="the key of h1 is of reward workers"):
        await asking(here, "h1", proof="other")


@playing(replace(ECHO, device=Device("cuda:0")))
async def test_a_host_asks_with_its_devices(here: Site) -> None:
    here.host("h1", gpus=1)
    await here.point.spawn(place(0))
    assert await asking(here, "h1", gpus=1) == HostState.WORKS
    with pytest.raises(ConfigError, match="compute on cuda:0, and host h1 has no GPU"):
        await asking(here, "h1")


@on_virtual_time
async def test_asking_without_a_run_fails_in_time() -> None:
    with closing(InprocWire()) as wire, pytest.raises(FleetFailed, match=f"no run answers at {ADDRESS}"):
        await state_of_host(wire, ADDRESS, "echo", "echo", HostId("h1"), VERSIONS, [])
    assert asyncio.get_running_loop().time() <= 10


@playing()
async def test_a_host_looks_its_controller_up_at_each_try(here: Site) -> None:
    asked = list[str]()

    async def resolve(address: str) -> str:
        asked.append(address)
        if len(asked) == 1:
            raise ConfigError("there is no host controller")
        return "inproc://of-the-last-start" if len(asked) == 2 else ADDRESS

    here.host("h1", address="tcp://controller:7000", resolve=resolve)
    await here.point.spawn(place(0))
    assert asked == 4 * ["tcp://controller:7000"], "a failed look-up, a failed try, orders, files"
    assert "cannot reach the run at tcp://controller:7000: there is no host controller; trying for 30 s" in here.said
