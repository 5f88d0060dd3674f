"""A slot with children that are objects here: when it starts a new one, and what it counts."""

import asyncio
from typing import Any

import pytest

from asyncrl.children.guarded_process import ChildEnded, ChildSlot, GuardedProcess, VanishedEarly


class Child(GuardedProcess):
    """A child without a process, which has answered thrice."""

    def __init__(self) -> None:
        self.ended = False
        self.finished = 3

    def greeted(self, message: Any) -> None: ...

    def take(self, message: Any) -> None: ...

    def finish(self, ended: ChildEnded) -> None: ...

    async def kill(self) -> None:
        self.ended = True


class Spawner:
    """Starts children after it raised each of these errors."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.children: list[Child] = []

    async def __call__(self) -> Child:
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)
        self.children.append(Child())
        return self.children[-1]


async def test_many_callers_share_one_child_until_it_ends() -> None:
    spawner = Spawner()
    slot = ChildSlot("the worker", spawner)
    first, second = await asyncio.gather(slot.child(), slot.child())
    assert first is second
    assert slot.finished == 3
    first.ended = True
    assert await slot.child() is not first
    assert slot.finished == 6
    assert len(spawner.children) == 2


async def test_one_signal_at_the_start_is_forgiven_and_two_are_not() -> None:
    for signal in (VanishedEarly("killed"), ChildEnded("its pipe broke", vanished=True)):
        assert not (await ChildSlot("the worker", Spawner(signal)).child()).ended
    with pytest.raises(VanishedEarly, match="again"):
        await ChildSlot("the worker", Spawner(VanishedEarly("killed"), VanishedEarly("again"))).child()


async def test_no_child_follows_a_stop() -> None:
    slot = ChildSlot("the reward worker", Spawner())
    child = await slot.child()
    await slot.stop()
    assert child.ended
    with pytest.raises(ChildEnded, match="the reward worker was stopped"):
        await slot.child()


async def test_a_child_that_still_starts_at_a_stop_is_killed() -> None:
    began = asyncio.Event()
    may_end = asyncio.Event()
    spawner = Spawner()

    async def spawn() -> Child:
        began.set()
        await may_end.wait()
        return await spawner()

    slot = ChildSlot("the reward worker", spawn)
    starting = asyncio.ensure_future(slot.child())
    await began.wait()
    await slot.stop()
    may_end.set()
    with pytest.raises(ChildEnded, match="the reward worker was stopped"):
        await starting
    assert [child.ended for child in spawner.children] == [True]


async def test_a_start_that_failed_is_not_tried_again_after_a_stop() -> None:
    spawner = Spawner()

    async def spawn() -> Child:
        await slot.stop()
        await spawner()
        raise VanishedEarly("killed")

    slot = ChildSlot("the reward worker", spawn)
    with pytest.raises(ChildEnded, match="was stopped"):
        await slot.child()
    assert len(spawner.children) == 1
