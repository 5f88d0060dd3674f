"""Offers of hosts that join: each has a name of its own, and starts a worker in time or is left out."""

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from asyncrl.errors import PeerLost, Refused
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.protocols.join_messages import JoinOrder, JoinRequest
from asyncrl.protocols.messages import Call
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
