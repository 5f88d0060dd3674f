"""Notices: together, in order, and never held up by a service that is away."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from asyncrl.controller.observers.recorder import ShownRows
from asyncrl.controller.row_releases import RowReleases
from asyncrl.errors import DeadlineExceeded, PeerLost
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import SampleName


class Holder:
    """A service that holds rows. away: set while it is started again."""

    def __init__(self) -> None:
        self.freed: list[list[SampleName]] = []
        self.oldest = 0
        self.states: list[str] = []
        self.back = asyncio.Event()
        self.back.set()
        self.moved = asyncio.Event()
        self.dies = False

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        await self.back.wait()
        if self.dies:
            self.dies = False
            raise PeerLost("died")
        self.freed.append(samples)
        self.oldest = oldest
        self.moved.set()

    async def idle_because(self, state: str) -> None:
        self.states.append(state)
        self.moved.set()

    async def hears(self) -> None:
        async with asyncio.timeout(60):
            await self.moved.wait()
        self.moved.clear()


def samples(*groups: int) -> list[SampleName]:
    return [(group, 0, 0) for group in groups]


def releases_to(
    generation: Holder,
    reference: Holder | None = None,
    acknowledged: Callable[[], None] = lambda: None,
    shown: ShownRows | None = None,
) -> RowReleases:
    return RowReleases(Fleet(generation, Holder(), Holder(), reference), lambda: 7, acknowledged, shown)


@asynccontextmanager
async def running(releases: RowReleases) -> AsyncIterator[None]:
    task = asyncio.ensure_future(releases.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def freed_after(generation: Holder, *groups: int) -> list[list[SampleName]]:
    """Releases samples of these groups one after the other; returns what the generator hears."""
    releases = releases_to(generation)
    for group in groups:
        releases.release(samples(group))
        await releases.flush()
    return generation.freed


async def test_releases_of_one_moment_go_in_one_call_to_each_service() -> None:
    generation = Holder()
    reference = Holder()
    releases = releases_to(generation, reference)
    releases.release(samples(1))
    releases.release(samples(2, 3))
    await releases.flush()
    assert generation.freed == reference.freed == [samples(1, 2, 3)]


async def test_a_service_that_is_away_does_not_keep_others_from_freeing_their_rows() -> None:
    generation = Holder()
    reference = Holder()
    releases = releases_to(generation, reference)
    reference.back.clear()
    async with running(releases):
        for group in range(3):
            releases.release(samples(group))
            await generation.hears()
        assert generation.freed == [samples(0), samples(1), samples(2)]
        assert reference.freed == []
        reference.back.set()
        await reference.hears()


async def test_a_service_that_dies_meanwhile_hears_what_comes_later() -> None:
    generation = Holder()
    generation.dies = True
    assert await freed_after(generation, 1, 2) == [samples(2)]


async def test_generation_is_told_the_newest_reason_once() -> None:
    generation = Holder()
    releases = releases_to(generation)
    for state in ("blocked", "starved", "blocked"):
        releases.idle_because(state)
    await releases.flush()
    releases.idle_because("blocked")
    await releases.flush()
    assert generation.states == ["blocked"]


async def test_what_a_service_has_yet_to_hear_is_counted_until_it_answers() -> None:
    generation = Holder()
    reference = Holder()
    room = asyncio.Event()
    releases = releases_to(generation, reference, room.set)
    reference.back.clear()
    releases.release(samples(1, 2))
    async with running(releases):
        await generation.hears()
        releases.release(samples(3))
        await generation.hears()
        room.clear()
        assert releases.unreleased == 3
        reference.back.set()
        async with asyncio.timeout(60):
            await room.wait()
            while releases.unreleased:
                room.clear()
                await room.wait()
        assert reference.oldest == 7


async def test_a_notice_that_is_not_answered_in_time_is_sent_again_before_the_next() -> None:
    class Slow(Holder):
        late = True

        async def release(self, samples: list[SampleName], oldest: int) -> None:
            if self.late:
                self.late = False
                raise DeadlineExceeded("generation0[0] did not answer release within 600 s")
            await super().release(samples, oldest)

    assert await freed_after(Slow(), 1, 2) == [samples(1, 2)]


async def test_rows_whose_texts_are_yet_to_be_read_are_freed_afterwards() -> None:
    generation = Holder()
    shown = ShownRows()
    releases = releases_to(generation, shown=shown)
    shown.keep([(2, 0), (3, 0)])
    shown.keep([(3, 0)])  # A step whose rows were lost is tried again.
    releases.release(samples(1, 2, 3))
    await releases.flush()
    assert generation.freed == [samples(1)]
    assert generation.oldest == 2, "groups before the oldest are freed without a name"
    assert releases.unreleased == 2
    shown.let_go([(2, 0), (3, 0)])
    await releases.flush()
    assert generation.freed == [samples(1), samples(2)]
    assert generation.oldest == 3
    shown.let_go([(3, 0)])
    await releases.flush()
    assert generation.freed == [samples(1), samples(2), samples(3)]
    assert (generation.oldest, releases.unreleased) == (7, 0)
