"""Notices: together, in order, and never held up by a service that is away."""

import asyncio

from asyncrl.errors import DeadlineExceeded, PeerLost
from asyncrl.fleet import Fleet
from asyncrl.notices import Notices
from asyncrl.protocols.batch import Place


class Holder:
    """A service that holds rows. away: set while it is started again."""

    def __init__(self) -> None:
        self.freed: list[list[Place]] = []
        self.states: list[str] = []
        self.back = asyncio.Event()
        self.back.set()
        self.moved = asyncio.Event()
        self.dies = False

    async def release(self, places: list[Place]) -> None:
        await self.back.wait()
        if self.dies:
            self.dies = False
            raise PeerLost("died")
        self.freed.append(places)
        self.moved.set()

    async def idle_because(self, state: str) -> None:
        self.states.append(state)
        self.moved.set()

    async def hears(self) -> None:
        async with asyncio.timeout(10):
            await self.moved.wait()
        self.moved.clear()


def places(*slots: int) -> list[Place]:
    return [Place("inproc://x", slot, 1, ("text",)) for slot in slots]


def fleet(generation: Holder, reference: Holder | None = None) -> Fleet:
    return Fleet(generation, Holder(), Holder(), reference)  # type: ignore[arg-type]


async def test_notices_of_one_moment_go_in_one_call_to_each_service() -> None:
    generation, reference = Holder(), Holder()
    notices = Notices(fleet(generation, reference))
    notices.release(places(1))
    notices.release(places(2, 3))
    await notices.flush()
    assert generation.freed == reference.freed == [places(1, 2, 3)]


async def test_a_service_that_is_away_does_not_keep_others_from_freeing_their_rows() -> None:
    generation, reference = Holder(), Holder()
    notices = Notices(fleet(generation, reference))
    reference.back.clear()
    running = asyncio.ensure_future(notices.run())
    try:
        for slot in range(3):
            notices.release(places(slot))
            await generation.hears()
        assert generation.freed == [places(0), places(1), places(2)]
        assert reference.freed == []
        reference.back.set()
        await reference.hears()
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_service_that_dies_meanwhile_hears_what_comes_later() -> None:
    generation = Holder()
    notices = Notices(fleet(generation))
    generation.dies = True
    notices.release(places(1))
    await notices.flush()
    notices.release(places(2))
    await notices.flush()
    assert generation.freed == [places(2)]


async def test_generation_is_told_the_newest_reason_once() -> None:
    generation = Holder()
    notices = Notices(fleet(generation))
    for state in ("blocked", "starved", "blocked"):
        notices.idle_because(state)
    await notices.flush()
    notices.idle_because("blocked")
    await notices.flush()
    assert generation.states == ["blocked"]


async def test_a_notice_that_is_not_answered_in_time_is_sent_again_with_the_next() -> None:
    class Slow(Holder):
        late = True

        async def release(self, places: list[Place]) -> None:
            if self.late:
                self.late = False
                raise DeadlineExceeded("generation0[0] did not answer release within 600 s")
            await super().release(places)

    generation = Slow()
    notices = Notices(fleet(generation))
    notices.release(places(1))
    await notices.flush()
    notices.release(places(2))
    await notices.flush()
    assert generation.freed == [places(1, 2)]
