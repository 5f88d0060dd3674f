"""Offers of hosts that join: each has a name of its own, and starts a worker in time or is left out."""

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from asyncrl.errors import ConfigError, PeerLost, Refused
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.protocols.messages import Call, JoinOrder, JoinRequest
from tests.unit.fleet.fake_workers import FakeProcess
from tests.unit.fleet.launching.test_joining import VERSIONS, Site, place, playing


def test_a_name_of_an_offer_is_taken_once() -> None:
    async def play(here: Site) -> None:
        request = JoinRequest("echo", "agent", "h1", "", "h1", VERSIONS, "echo")
        first, second = (
            cast(AsyncGenerator[JoinOrder, None], here.point.dispatch(Call(0, "join", (request,), 5.0)))
            for _ in range(2)
        )
        assert (await anext(first)).kind == "fetch"
        with pytest.raises(Refused, match="agent has joined already"):
            await anext(second)
        await first.aclose()

    playing(play)


def test_a_host_that_starts_no_worker_in_time_is_left_out() -> None:
    async def play(here: Site) -> None:
        async def hang(spec: WorkerSpec) -> FakeProcess:
            await asyncio.Event().wait()
            raise AssertionError

        here.host("h1")
        here.hosts["h1"][1].spawn = hang  # type: ignore[method-assign]
        with pytest.raises(PeerLost, match=r"h1 did not start echo0\.0-0-a: nothing came within 60 s"):
            await here.point.spawn(place(0))
        assert asyncio.get_running_loop().time() < 61

    playing(play)


def test_a_spare_comes_before_a_host_at_which_a_worker_ended() -> None:
    async def play(here: Site) -> None:
        here.host("h1")
        first = await here.point.spawn(place(0))
        here.host("h2")
        await asyncio.sleep(1.0)
        here.worker("h1").die("ended: CUDA out of memory")
        await first.wait()
        second = await here.point.spawn(place(0, "b"))
        assert (first.host.name, second.host.name) == ("h1", "h2")
        here.worker("h2").die()
        await second.wait()
        assert (await here.point.spawn(place(0, "c"))).host.name == "h1", "there is no better one"

    playing(play)


async def unable(here: Site, replica: int, name: str, why: str) -> None:
    """Has a host start a worker that cannot load, as the supervisor does."""
    worker = await here.point.spawn(place(replica, name))
    worker.give_up(why, has_run=False)
    worker.stop()
    await worker.wait()


def test_a_host_that_cannot_start_a_worker_loses_its_offer_after_three_tries_and_may_join_anew() -> None:
    async def play(here: Site) -> None:
        left = here.host("h1")
        for name in "abc":
            await unable(here, 0, name, "it could not start on h1: CUDA out of memory")
        with pytest.raises(ConfigError, match=r"h1 gets no echo worker any more, because 3 in a row .* out of memory"):
            await left
        here.host("h2")
        assert (await here.point.spawn(place(0, "d"))).host.name == "h2"
        here.host("h1")
        assert (await here.point.spawn(place(1, "e"))).host.name == "h1", "a host that joins again makes another offer"

    said = playing(play)
    told = [text for text in said if text.startswith("h1 gets no echo worker any more")]
    assert len(told) == 1
    assert "CUDA out of memory. Mend that on h1, and start `" in told[0]
    assert told[0].endswith("join echo` there again")


def test_a_worker_that_took_calls_keeps_its_host_the_offer() -> None:
    async def play(here: Site) -> None:
        here.host("h1")
        for name in "abcdefg":
            worker = await here.point.spawn(place(0, name))
            worker.give_up("killed by SIGKILL", has_run=name in "cf")
            worker.stop()
            await worker.wait()
        assert (await here.point.spawn(place(0, "h"))).host.name == "h1"

    assert not any("gets no" in text for text in playing(play))


def test_a_host_says_why_its_worker_was_ended() -> None:
    async def play(here: Site) -> None:
        here.host("h1")
        await unable(here, 0, "a", "echo0[0] raised ImportError: no lxml")

    said = playing(play)
    why = "because the controller gave it up: echo0[0] raised ImportError: no lxml"
    assert f"echo0.0-0-a ended, {why}" in said


def test_a_worker_whose_host_is_gone_did_not_die_of_what_it_did() -> None:
    async def play(here: Site) -> None:
        for number, name in enumerate(("h1", "h2")):
            here.host(name)
            worker = await here.point.spawn(place(number))
            if name == "h1":
                here.hosts[name][2].cancel()
            else:
                here.worker(name).die()
            await worker.wait()
            assert worker.host_is_gone == (name == "h1")

    playing(play)
