"""How ranks learn where they meet: both ends, without a fleet."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.errors import DeadlineExceeded, Refused
from asyncrl.fleet.worker.rank_meeting import RankMeeting, RankMeetings
from asyncrl.protocols.rank_layout import Layout
from tests.unit.fleet.fake_workers import spec_of

ADDRESS = f"tcp://10.77.0.1:7000/{'ab' * 16}"


class Rank:
    """The control lane of one rank."""

    def __init__(self) -> None:
        self.meeting = RankMeeting()

    async def call(self, method: str, args: tuple[Any, ...], deadline: float) -> str:
        assert method == "meet"
        return self.meeting.take(*args)


def rank(number: int, *, size: int = 2) -> Any:
    return replace(spec_of(f"echo0.{number}"), rank=number, layout=Layout(dp=size))


async def test_all_ranks_meet_where_the_first_one_listens_in_whichever_order_they_start() -> None:
    meetings = RankMeetings()
    ranks = [Rank(), Rank(), Rank()]
    for first in (False, True):
        order = (0, 1, 2) if first else (2, 1, 0)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for number in order:
                tasks.create_task(meetings.bring(rank(number, size=3), ranks[number], 5.0))
        places = [await each.meeting.place(1.0) for each in ranks]
        assert len({(place.host, place.port, place.name) for place in places}) == 1
        assert [place.listener is not None for place in places] == [True, False, False]
    ranks[0].meeting.close()


async def test_an_address_of_the_next_instance_takes_the_place_of_the_last_one() -> None:
    meetings = RankMeetings()
    other = Rank()
    for first in (Rank(), again := Rank()):
        await meetings.bring(rank(0), first, 1.0)
        first.meeting.close()
    await meetings.bring(rank(1), other, 1.0)
    assert (await other.meeting.place(1.0)).name == (await again.meeting.place(1.0)).name


async def test_one_rank_alone_is_not_asked() -> None:
    alone = Rank()
    await RankMeetings().bring(rank(0, size=1), alone, 1.0)
    with pytest.raises(DeadlineExceeded, match=r"did not say within 0\.01 s where the ranks meet"):
        await alone.meeting.place(0.01)


async def test_other_ranks_wait_for_the_first_one_no_longer_than_said() -> None:
    with pytest.raises(DeadlineExceeded, match=r"rank 0 of echo0 has not started within 0\.01 s"):
        await RankMeetings().bring(rank(1), Rank(), 0.01)


@pytest.mark.parametrize(
    "wrong", ["tcp://h:1", "ipc:///x:1/" + "ab" * 16, f"tcp://h:123456/{'ab' * 16}", "tcp://h:1/AB"]
)
async def test_what_is_no_address_of_a_meeting_is_refused(wrong: str) -> None:
    meeting = RankMeeting()
    with pytest.raises(Refused, match=re.escape(f"{wrong!r} is no address at which ranks meet")):
        meeting.take(wrong)
    assert meeting.take(ADDRESS) == ADDRESS
    with pytest.raises(Refused, match=r"meet at .* already"):
        meeting.take(ADDRESS.replace("7000", "7001"))


@pytest.mark.parametrize(
    ("address", "host"),
    [("tcp://10.77.0.2:99", "10.77.0.2"), ("ipc:///run/x.control", "127.0.0.1"), ("inproc://x.control", "127.0.0.1")],
)
def test_ranks_are_reached_where_their_workers_are(address: str, host: str) -> None:
    assert RankMeeting.at(address).own_host == host
