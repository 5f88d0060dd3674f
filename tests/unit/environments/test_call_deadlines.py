"""Deadlines of calls in a child, on virtual time: one timer for all, and only for those that wait."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from asyncrl.environments import episode
from asyncrl.environments.episode import GRACE, Answer, CallDeadlines, Episode
from asyncrl.environments.observation import Observation
from asyncrl.simulation.virtual_loop import run

ENDLESS = 10_000.0


class Waits:
    """Waits as long as it is told to, some turns whatever cancels it."""

    def __init__(self, stubborn: bool = False) -> None:
        self.stubborn = stubborn
        self.closed = False

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        return Observation("")

    async def step(self, message: str) -> Observation:
        seconds = float(message)
        if not seconds:
            return Observation("at once")
        try:
            while True:
                try:
                    await asyncio.sleep(seconds)
                    return Observation("later")
                except asyncio.CancelledError:
                    if not self.stubborn:
                        raise
        finally:
            self.closed = True


async def begun(deadlines: CallDeadlines, environment: Waits) -> Episode:
    episode = Episode(lambda: environment, 100, deadlines)
    episode.mark_with(lambda: None, lambda: None)
    await episode.reset({}, 0)
    return episode


async def timed(work: Coroutine[Any, Any, Answer]) -> tuple[float, str]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    answer = await work
    return loop.time() - began, str(answer.get("error", ""))


def test_calls_are_cancelled_when_they_are_due_in_the_order_in_which_they_began() -> None:
    async def main() -> list[tuple[float, str]]:
        deadlines = CallDeadlines(10.0)
        episodes = [await begun(deadlines, Waits()) for _ in range(3)]
        first = asyncio.create_task(timed(episodes[0].step(str(ENDLESS))))
        await asyncio.sleep(4)
        second = asyncio.create_task(timed(episodes[1].step(str(ENDLESS))))
        third = asyncio.create_task(timed(episodes[2].step("9")))
        return [await each for each in (first, second, third)]

    first, second, third = run(main())
    assert first == second == (10.0, "`step` hung: no answer within 10 s")
    assert third == (9.0, "")


def test_a_call_that_ignores_its_cancellation_is_given_up_and_closed() -> None:
    environment = Waits(stubborn=True)

    async def main() -> tuple[float, str]:
        return await timed((await begun(CallDeadlines(10.0), environment)).step(str(ENDLESS)))

    assert run(main()) == (10.0 + GRACE, "`step` hung: no answer within 10 s")
    assert environment.closed


def test_calls_that_never_wait_set_no_timer_and_others_share_one() -> None:
    async def main() -> None:
        deadlines = CallDeadlines(10.0)
        episodes = [await begun(deadlines, Waits()) for _ in range(20)]
        await episodes[0].step("0")
        assert deadlines._timer is None
        waiting = [asyncio.create_task(episode.step("5")) for episode in episodes]
        await asyncio.sleep(0)
        timer = deadlines._timer
        assert len(deadlines._due) == 20
        await asyncio.gather(*waiting)
        assert deadlines._timer is timer
        assert not deadlines._due
        await asyncio.sleep(20)
        assert deadlines._timer is None

    run(main())
    assert episode.GRACE < 10
