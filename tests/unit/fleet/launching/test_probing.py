"""Probes of a join point: its bounds, and what a host measures, on virtual time."""

import asyncio
from typing import Any

import pytest

from asyncrl.errors import Refused
from asyncrl.fleet.launching.join_point import ProbePoint
from asyncrl.fleet.launching.joining import (
    PART_BYTES,
    PROBE_BYTES,
    ROUND_TRIPS,
    TURN,
    WINDOW,
    measure_bandwidth,
    measure_clock,
    probe,
)
from asyncrl.protocols.messages import Call, JoinRequest
from tests.unit.fleet.launching.sites import ADDRESS, VERSIONS, Site, playing
from tests.virtual_time import on_virtual_time


def request(proof: str = "echo", service: str = "echo", torch: str = "2", agent: str = "a1") -> JoinRequest:
    return JoinRequest(service, agent, "h1", "h1", "h1", VERSIONS | {"torch": torch}, proof)


def point() -> ProbePoint:
    return ProbePoint(lambda request: "", lambda service: ("asyncrl",), VERSIONS)


async def ask(point: ProbePoint, method: str, *args: Any) -> Any:
    return await point.dispatch(Call(0, method, args, 1.0))


@playing()
async def test_a_probe_says_what_joining_would_and_takes_no_place(here: Site) -> None:
    found = await probe(here.wire, ADDRESS, request())
    assert (found.answer.objection, found.answer.packages) == ("", ["asyncrl", "torch"])
    assert found.answer.versions == VERSIONS
    assert found.up.bytes == found.down.bytes == PROBE_BYTES
    assert here.said == ["1 echo workers are to join at inproc://joining; each by: asyncrl join echo"]
    assert here.point._offers == {}
    for wrong, why in (
        (request("other"), "is of reward workers"),
        (request("gone"), "is not admitted, or no more"),
        (request(torch="1"), "the controller has torch 2, and host h1 has torch 1"),
        (request(service="training"), "no training workers join this run"),
    ):
        assert why in (await probe(here.wire, ADDRESS, wrong)).answer.objection


@playing()
async def test_one_turn_at_a_time_however_many_ask(here: Site) -> None:
    found = await asyncio.gather(*(probe(here.wire, ADDRESS, request(agent=f"a{number}")) for number in range(3)))
    assert len({each.answer.ticket for each in found}) == 3
    assert asyncio.get_running_loop().time() >= 2 * TURN


async def test_a_turn_moves_so_many_bytes_each_way_and_no_more() -> None:
    here = point()
    ticket = (await ask(here, "probe", request())).ticket
    for _ in range(PROBE_BYTES // PART_BYTES):
        assert await ask(here, "upload", ticket, bytes(PART_BYTES)) == PART_BYTES
        assert len(await ask(here, "download", ticket, PART_BYTES)) == PART_BYTES
    for method, argument in (("upload", b"1"), ("download", 1)):
        with pytest.raises(Refused, match=f"a probe may move {PROBE_BYTES} bytes each way"):
            await ask(here, method, ticket, argument)
    with pytest.raises(Refused, match="another probe runs"):
        await ask(here, "probe", request())


@pytest.mark.parametrize(
    ("method", "argument"),
    [("upload", b""), ("upload", bytes(PART_BYTES + 1)), ("download", -1), ("download", PART_BYTES + 1)],
)
async def test_a_part_has_a_size(method: str, argument: bytes | int) -> None:
    here = point()
    ticket = (await ask(here, "probe", request())).ticket
    with pytest.raises(Refused, match="a part of a probe has 1 to"):
        await ask(here, method, ticket, argument)


@pytest.mark.parametrize("ticket", ["", "00ff"])
async def test_without_the_ticket_of_the_turn_nothing_moves(ticket: str) -> None:
    here = point()
    for begun in (False, True):
        if begun:
            await ask(here, "probe", request())
        with pytest.raises(Refused, match="another probe has begun since"):
            await ask(here, "download", ticket, 1)


async def test_other_calls_are_no_part_of_a_probe() -> None:
    with pytest.raises(Refused, match="a probe has no part 'upload' like this"):
        await ask(point(), "upload", "ticket", 12)


@on_virtual_time
async def test_the_offset_is_that_of_the_fastest_round_trip() -> None:
    """The controller's clock is 7 s ahead; the answer takes longer than the question, so that the offset is wrong by
    less than the uncertainty and not by nothing."""
    loop = asyncio.get_running_loop()
    asked = 0

    async def theirs() -> float:
        nonlocal asked
        asked += 1
        slow = 1.0 if asked != 5 else 0.01
        await asyncio.sleep(slow)
        answer = loop.time() + 7.0
        await asyncio.sleep(3 * slow)
        return answer

    clock = await measure_clock(theirs, loop.time)
    assert asked == ROUND_TRIPS
    assert [clock.offset, clock.uncertainty, clock.median] == pytest.approx([7.0 - 0.01, 0.02, 4.0])


@pytest.mark.parametrize(("part_takes", "expected"), [(0.1, PROBE_BYTES), (2.0, 2 * WINDOW * PART_BYTES)])
@on_virtual_time
async def test_bandwidth_is_measured_for_a_few_seconds_at_most(part_takes: float, expected: int) -> None:
    async def move() -> int:
        await asyncio.sleep(part_takes)
        return PART_BYTES

    found = await measure_bandwidth(move)
    assert found.bytes == expected
    assert found.rate == pytest.approx(WINDOW * PART_BYTES / part_takes)


@on_virtual_time
async def test_a_measurement_that_is_refused_counts_what_it_moved() -> None:
    moved = 0

    async def move() -> int:
        nonlocal moved
        await asyncio.sleep(0.1)
        if moved == 3:
            raise Refused("another probe has begun since")
        moved += 1
        return PART_BYTES

    found = await measure_bandwidth(move)
    assert (found.bytes, found.problem) == (3 * PART_BYTES, "another probe has begun since")
