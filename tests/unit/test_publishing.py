import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asyncrl import virtual
from asyncrl.errors import PeerLost
from asyncrl.events import Event, WeightsHandedOver, WeightsOverdue
from asyncrl.fleet import Fleet
from asyncrl.protocols.contracts import Generation, Reward, Training
from asyncrl.protocols.messages import Published, Using
from asyncrl.publishing import Publisher


class Readers(Generation):
    """Flips after as many seconds as `delays` says, one after the other; then at once. inf: dies."""

    def __init__(self, *delays: float) -> None:
        self.delays = list(delays)
        self.asked: list[int] = []
        self.told: list[Published] = []

    async def use_weights(self, published: Published) -> Using:
        self.asked.append(published.version)
        self.told.append(published)
        delay = self.delays.pop(0) if self.delays else 0.0
        if delay == float("inf"):
            raise PeerLost("generation died")
        await asyncio.sleep(delay)
        return Using(("reader-a", "reader-b"), published.version)


class Leases(Training):
    def __init__(self) -> None:
        self.using_now: dict[str, int] = {}

    async def using(self, reader: str, version: int) -> None:
        self.using_now[reader] = version


class Scene:
    def __init__(self, *delays: float) -> None:
        self.readers, self.leases = Readers(*delays), Leases()
        self.events: list[Event] = []
        self.evicted: list[str] = []
        fleet = Fleet(self.readers, Reward(), self.leases)
        self.publisher = Publisher(fleet, 10.0, self.events.append, self.evicted.append)
        for reader in ("reader-a", "reader-b"):
            self.publisher.join(reader)

    def announce(self, version: int) -> None:
        self.publisher.announce(Published(0, version, "arena", version % 2, ""))


def play(scene: Scene, script: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(scene.publisher.run())
            await script(scene)
            running.cancel()

    virtual.run(main())


def test_what_readers_use_is_told_to_the_trainer() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(3)

    scene = Scene(2.0)
    play(scene, script)
    assert scene.leases.using_now == {"reader-a": 1, "reader-b": 1}
    assert scene.events == [WeightsHandedOver(1, ("reader-a", "reader-b"), pytest.approx(2.0))]


def test_readers_jump_to_the_newest() -> None:
    async def script(scene: Scene) -> None:
        for version in (1, 2, 3):
            scene.announce(version)
            await asyncio.sleep(1)
        await asyncio.sleep(10)

    scene = Scene(5.0)
    play(scene, script)
    assert scene.readers.asked == [1, 3]


def test_a_reader_that_holds_on_is_named_and_evicted() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(1)
        scene.publisher.forget("reader-b")
        scene.announce(2)
        await asyncio.sleep(30)

    scene = Scene(0.0, 1000.0)
    play(scene, script)
    assert scene.events[1] == WeightsOverdue(2, ("reader-a",), pytest.approx(10.0))
    assert scene.evicted == ["reader-a"]


def test_a_death_is_not_the_publishers_business() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(1)
        scene.announce(1)
        await asyncio.sleep(1)

    scene = Scene(float("inf"))
    play(scene, script)
    assert scene.readers.asked == [1, 1]
    assert scene.leases.using_now == {"reader-a": 1, "reader-b": 1}


def test_a_reader_that_joins_holds_its_version_before_it_is_told_of_it() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(1)
        assert scene.readers.asked == [1]
        assert scene.leases.using_now == {"reader-a": 1, "reader-b": 1}, "attached, while their answer is on the way"
        await asyncio.sleep(5)

    play(Scene(5.0), script)


def test_a_reader_that_never_took_over_a_version_is_evicted() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(30)

    scene = Scene(1000.0)
    play(scene, script)
    assert scene.evicted == ["reader-a", "reader-b"]
    assert scene.readers.asked == [1, 1], "whoever only did not hear of it is told again"


def test_a_reader_that_dies_after_its_answer_is_not_attached_again() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(1)
        scene.announce(2)
        await asyncio.sleep(1)
        scene.publisher.forget("reader-a")  # the other reader's answer is still to come
        scene.leases.using_now.pop("reader-a")
        await asyncio.sleep(5)

    scene = Scene(0.0, 5.0)
    play(scene, script)
    assert scene.leases.using_now == {"reader-b": 2}


def test_weights_are_kept_for_those_that_are_told() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        scene.publisher.join("reader-c")
        await asyncio.sleep(1)
        scene.publisher.join("reader-d")
        await asyncio.sleep(5)

    scene = Scene(3.0)
    play(scene, script)
    (published,) = scene.readers.told
    assert [published.is_kept_for(f"reader-{name}") for name in "abcd"] == [True, True, True, False]
    assert set(scene.leases.using_now) == {"reader-a", "reader-b", "reader-c"}
