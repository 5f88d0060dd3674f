"""Limits of calls on a clock that only sleeps move."""

import asyncio

from asyncrl.rewards.remote_judge import CallLimits


class Time:
    now = 100.0

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, until)


async def begun(limits: CallLimits, time: Time) -> float:
    async with limits.call():
        return time.now


async def test_calls_begin_evenly_spaced() -> None:
    time = Time()
    limits = CallLimits(8, 4.0, lambda: time.now, time.sleep)
    assert list(await asyncio.gather(*(begun(limits, time) for _ in range(4)))) == [100.0, 100.25, 100.5, 100.75]
    time.now = 200.0
    assert [await begun(limits, time), await begun(limits, time)] == [200.0, 200.25]


async def test_a_pause_holds_back_every_call_and_a_shorter_one_does_not_end_it() -> None:
    time = Time()
    limits = CallLimits(8, 0.0, lambda: time.now, time.sleep)
    limits.pause(20.0)
    limits.pause(5.0)
    assert await begun(limits, time) == 120.0
    assert await begun(limits, time) == 120.0
