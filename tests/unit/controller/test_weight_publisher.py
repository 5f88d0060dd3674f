import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.concurrency import root_cause
from asyncrl.controller.observers.events import Event, Warned, WeightsHandedOver
from asyncrl.controller.weight_publisher import WeightPublisher
from asyncrl.errors import (
    ArenaFull,
    AsyncrlError,
    DeadlineExceeded,
    FleetFailed,
    PeerLost,
    Refused,
    RemoteError,
    WeightsError,
    WireError,
)
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.messages import Published, Using
from asyncrl.protocols.service_contracts import Generation, Reward, Training
from asyncrl.simulation import virtual_loop


class Reader(Generation):
    """Flips after as many seconds as `delays` says, one after the other; then at once. inf: dies."""

    def __init__(self, name: str, delays: list[float]) -> None:
        self.name = name
        self.delays = delays
        self.told: list[Published] = []

    async def use_weights(self, published: Published) -> Using:
        self.told.append(published)
        delay = self.delays.pop(0) if self.delays else 0.0
        if delay == float("inf"):
            raise PeerLost("generation died")
        await asyncio.sleep(delay)
        return Using((self.name,), published.version)


class Readers(Generation):
    def __init__(self, delays: Mapping[str, list[float]]) -> None:
        self.each = {name: Reader(name, list(delays.get(name, ()))) for name in ("a", "b", "c")}

    def replica_of(self, instance: str) -> Generation:  # type: ignore[override]
        return self.each[instance]

    def asked(self, reader: str) -> list[int]:
        return [published.version for published in self.each[reader].told]


class Leases(Training):
    def __init__(self) -> None:
        self.using_now: dict[str, int] = {}

    async def using(self, readers: tuple[str, ...], version: int) -> None:
        self.using_now |= dict.fromkeys(readers, version)


class Scene:
    def __init__(self, leases: Leases | None = None, **delays: list[float]) -> None:
        self.readers, self.leases = Readers(delays), leases or Leases()
        self.events: list[Event] = []
        self.killed: list[str] = []
        fleet = Fleet(self.readers, Reward(), self.leases)
        self.killed_at = 0.0
        self.left_out: list[tuple[str, str]] = []
        self.publisher = WeightPublisher(
            fleet, 10.0, self.events.append, self.kill, lambda reader, why: self.left_out.append((reader, why))
        )
        for reader in ("a", "b"):
            self.publisher.join(reader)

    def kill(self, reader: str) -> None:
        self.killed.append(reader)
        self.killed_at = asyncio.get_running_loop().time()

    @property
    def warnings(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Warned)]

    def announce(self, version: int, transfer: float = 0.0) -> None:
        self.publisher.announce(Published(0, version, "arena", version % 2, "", transfer=transfer))


def play(scene: Scene, script: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(scene.publisher.run())
            await script(scene)
            running.cancel()

    virtual_loop.run(main())


def test_what_readers_use_is_told_to_the_trainer() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(3)

    scene = Scene(a=[1.0], b=[2.0])
    play(scene, script)
    assert scene.leases.using_now == {"a": 1, "b": 1}
    handed_over = [WeightsHandedOver(1, "a", pytest.approx(1.0)), WeightsHandedOver(1, "b", pytest.approx(2.0))]
    assert scene.events == handed_over


@pytest.mark.parametrize(("transfer", "killed"), [(0.0, ["a"]), (4.0, ["a"]), (6.0, [])])
def test_readers_have_the_time_that_the_bytes_of_a_version_take(transfer: float, killed: list[str]) -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1, transfer)
        await asyncio.sleep(30)

    scene = Scene(a=[15.0])
    play(scene, script)
    assert scene.killed == killed


def test_what_a_reader_says_of_the_canary_is_observed() -> None:
    class Off(Reader):
        async def use_weights(self, published: Published) -> Using:
            return replace(await super().use_weights(published), canary=0.25)

    async def script(scene: Scene) -> None:
        scene.readers.each["b"] = Off("b", [])
        scene.announce(1)
        await asyncio.sleep(1)

    scene = Scene()
    play(scene, script)
    assert {event.reader: event.canary for event in scene.events if isinstance(event, WeightsHandedOver)} == {
        "a": None,
        "b": 0.25,
    }


def test_readers_jump_to_the_newest() -> None:
    async def script(scene: Scene) -> None:
        for version in (1, 2, 3):
            scene.announce(version)
            await asyncio.sleep(1)
        await asyncio.sleep(10)

    scene = Scene(a=[5.0])
    play(scene, script)
    assert scene.readers.asked("a") == [1, 3]


def test_a_version_that_was_overtaken_on_its_way_is_told_to_nobody() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(2)
        scene.announce(1)
        await asyncio.sleep(1)

    scene = Scene()
    play(scene, script)
    assert scene.readers.asked("a") == scene.readers.asked("b") == [2]


def test_a_reader_that_holds_on_is_killed_and_no_other_one_waits_for_it() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(1)
        for version in (2, 3):
            scene.announce(version)
            await asyncio.sleep(1)
        assert scene.leases.using_now == {"a": 1, "b": 3}
        await asyncio.sleep(30)

    scene = Scene(a=[0.0, 1000.0])
    play(scene, script)
    assert scene.killed == ["a"]
    assert scene.killed_at == pytest.approx(11.0), "it was called with version 2 after one second"
    assert scene.readers.asked("a") == [1, 2], "it is dying: until it is dead it holds what the trainer knows of"
    assert scene.readers.asked("b") == [1, 2, 3]


def test_a_death_is_not_the_publishers_business() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(1)
        scene.announce(1)
        await asyncio.sleep(1)

    scene = Scene(a=[float("inf")])
    play(scene, script)
    assert scene.readers.asked("a") == [1, 1]
    assert scene.readers.asked("b") == [1], "it has what it is to read"
    assert scene.leases.using_now == {"a": 1, "b": 1}
    assert scene.killed == []


class Failing(Reader):
    """Raises these errors, one a call, and takes the weights then."""

    def __init__(self, name: str, *errors: AsyncrlError, after: float = 0.0) -> None:
        super().__init__(name, [])
        self.errors = list(errors)
        self.after = after

    async def use_weights(self, published: Published) -> Using:
        if not self.errors or published.version == 1:
            return await super().use_weights(published)
        self.told.append(published)
        await asyncio.sleep(self.after)
        raise self.errors.pop(0)


FAULTS = [
    WeightsError("generation0[0]: weights-0-1.safetensors is damaged"),
    RemoteError("OutOfMemoryError", "CUDA out of memory", "generation0", 0, ""),
    ArenaFull("no slot"),
    WireError("a frame of 18054040 bytes"),
]


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_an_error_of_one_reader_ends_that_reader_and_the_same_of_all_ends_the_run(error: AsyncrlError) -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(1)
        scene.announce(2)
        await asyncio.sleep(30)

    one = Scene()
    one.readers.each["b"] = Failing("b", error)
    play(one, script)
    assert one.killed == ["b"]
    assert one.readers.asked("a") == [1, 2]
    both = Scene()
    both.readers.each |= {"a": Failing("a", error), "b": Failing("b", error)}
    with pytest.raises(BaseExceptionGroup) as ended:
        play(both, script)
    failed = root_cause(ended.value)
    assert isinstance(failed, FleetFailed)
    assert failed.exit_code == 75
    assert f"version 2 do not reach b: {error}" in str(failed)


LATE = DeadlineExceeded("generation0[0]: weights at tcp://t did not answer weights_chunk within 7 s")
LOST = PeerLost("generation0[0]: weights at tcp://t: no sign of life for 3 heartbeats of 2 s")


@pytest.mark.parametrize("error", [LATE, LOST, Refused("the sender has version 1")])
@pytest.mark.parametrize("tries", [1, 4])
def test_weights_that_did_not_come_are_offered_again_to_all_until_they_do(error: AsyncrlError, tries: int) -> None:
    """The trainer, or its link, stands still for half a minute."""

    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(1)
        scene.announce(2)
        await asyncio.sleep(300)

    scene = Scene()
    scene.readers.each |= {name: Failing(name, *[error] * tries, after=7.0) for name in ("a", "b")}
    play(scene, script)
    assert scene.killed == []
    assert scene.left_out == []
    assert scene.leases.using_now == {"a": 2, "b": 2}
    assert scene.readers.asked("a") == [1, *[2] * tries, 2]
    assert bool(scene.warnings) == (tries > 2), "a hiccup is no matter"


@pytest.mark.parametrize("error", [LATE, LOST])
def test_a_pair_that_does_not_meet_is_named_and_its_reader_left_out_until_it_does(error: AsyncrlError) -> None:
    async def script(scene: Scene) -> None:
        for version in range(1, 50):
            scene.announce(version)
            await asyncio.sleep(10)

    scene = Scene()
    scene.readers.each["b"] = Failing("b", *[error] * 6, after=3.0)
    play(scene, script)
    assert scene.killed == []
    assert [(reader, bool(why)) for reader, why in scene.left_out] == [("b", True), ("b", False)]
    named, back = scene.warnings
    assert f"do not come to b from arena: {error}. It gets no samples until it has new weights" in named
    assert back == "b has the weights again, and gets samples"
    assert scene.readers.asked("a") == list(range(1, 50)), "nobody waits for the other one"
    assert scene.leases.using_now == {"a": 49, "b": 49}


def test_a_reader_whose_rows_the_trainer_does_not_get_is_left_out_until_weights_come_to_it() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(1)
        scene.publisher.unread(["a", "nobody"], "the owner of tcp://h2#a is gone")
        scene.publisher.unread(["a", "b"], "the owner of tcp://h4#b is gone")
        assert [reader for reader, _ in scene.left_out] == ["a"], "the last one goes on"
        scene.announce(2)
        await asyncio.sleep(1)
        assert [(reader, bool(why)) for reader, why in scene.left_out] == [("a", True), ("a", False)]

    scene = Scene()
    play(scene, script)
    named, back = scene.warnings
    assert named.startswith("rows do not come to the trainer from a: the owner of tcp://h2#a is gone")
    assert back == "a has the weights again, and gets samples"


def test_a_reader_that_is_replaced_is_offered_nothing_more() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(1)
        scene.announce(2)
        await asyncio.sleep(60)
        asked = len(scene.readers.asked("b"))
        scene.publisher.forget("b")
        await asyncio.sleep(600)
        assert len(scene.readers.asked("b")) == asked

    scene = Scene()
    scene.readers.each["b"] = Failing("b", *[LOST] * 100)
    play(scene, script)


def test_a_reader_that_joins_holds_its_version_before_it_is_told_of_it() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(1)
        assert scene.readers.asked("a") == [1]
        assert scene.leases.using_now == {"a": 1, "b": 1}, "attached, while their answers are on the way"
        await asyncio.sleep(5)

    play(Scene(a=[5.0], b=[5.0]), script)


def test_a_reader_that_never_took_over_a_version_is_killed() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(30)

    scene = Scene(a=[1000.0])
    play(scene, script)
    assert scene.killed == ["a"]


def test_a_trainer_that_does_not_answer_kills_no_reader() -> None:
    class Stuck(Leases):
        async def using(self, readers: tuple[str, ...], version: int) -> None:
            raise DeadlineExceeded("training0.0 did not answer using within 600 s")

    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(30)

    scene = Scene(Stuck())
    with pytest.raises(ExceptionGroup) as raised:
        play(scene, script)
    assert isinstance(root_cause(raised.value), DeadlineExceeded)
    assert scene.killed == []


def test_a_reader_that_dies_after_its_answer_is_not_attached_again() -> None:
    class Slow(Leases):
        async def using(self, readers: tuple[str, ...], version: int) -> None:
            await asyncio.sleep(1)
            await super().using(readers, version)

    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(1.5)  # attached, and its answer is on its way to the trainer
        scene.publisher.forget("a")
        await asyncio.sleep(5)

    scene = Scene(Slow())
    play(scene, script)
    assert [event.reader for event in scene.events if isinstance(event, WeightsHandedOver)] == ["b"]


class CountedCalls(Leases):
    """Takes a second for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[set[str], int]] = []

    async def using(self, readers: tuple[str, ...], version: int) -> None:
        self.calls.append(({*readers}, version))
        await asyncio.sleep(1)
        await super().using(readers, version)


def test_readers_that_answer_during_a_call_to_the_trainer_share_the_next_one() -> None:
    async def script(scene: Scene) -> None:
        scene.publisher.join("c")
        scene.announce(1)
        await asyncio.sleep(10)

    leases = CountedCalls()
    scene = Scene(leases, a=[1.0], b=[1.2], c=[1.8])
    play(scene, script)
    assert leases.calls == [({"a", "b", "c"}, 1), ({"a"}, 1), ({"b", "c"}, 1)], "attached, then reported"
    seconds = {event.reader: event.seconds for event in scene.events if isinstance(event, WeightsHandedOver)}
    assert seconds == pytest.approx({"a": 3.0, "b": 4.0, "c": 4.0})


def test_a_dead_reader_is_reported_no_more() -> None:
    """A report after the end of its lease would begin another lease, which nobody ends."""

    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(2.5)  # b has answered, while the trainer takes what a reads
        scene.publisher.forget("b")
        await asyncio.sleep(10)

    leases = CountedCalls()
    play(Scene(leases, a=[1.0], b=[1.2]), script)
    assert leases.calls == [({"a", "b"}, 1), ({"a"}, 1)]


def test_readers_share_the_fate_of_their_report() -> None:
    class Overwritten(CountedCalls):
        async def using(self, readers: tuple[str, ...], version: int) -> None:
            await super().using(readers, version)
            if len(self.calls) == 3:
                raise Refused("the arena holds [2, 3]")

    async def script(scene: Scene) -> None:
        scene.publisher.join("c")
        scene.announce(1)
        await asyncio.sleep(10)

    scene = Scene(Overwritten(), a=[1.0], b=[1.2], c=[1.8])
    play(scene, script)
    assert [event.reader for event in scene.events if isinstance(event, WeightsHandedOver)] == ["a"]


def test_weights_are_kept_for_those_that_are_told() -> None:
    async def script(scene: Scene) -> None:
        scene.announce(1)
        scene.publisher.join("c")
        await asyncio.sleep(1)
        scene.publisher.join("d")
        await asyncio.sleep(5)

    scene = Scene(a=[3.0])
    play(scene, script)
    for name, reader in scene.readers.each.items():
        (published,) = reader.told
        assert published.readers == (name,)
    assert set(scene.leases.using_now) == {"a", "b", "c"}


def test_a_reader_that_goes_on_with_what_it_reads_took_over_nothing() -> None:
    class GoesOn(Reader):
        async def use_weights(self, published: Published) -> Using:
            return Using((), published.version)

    async def script(scene: Scene) -> None:
        scene.announce(1)
        await asyncio.sleep(1)

    scene = Scene()
    scene.readers.each["a"] = GoesOn("a", [])
    play(scene, script)
    assert [event.reader for event in scene.events if isinstance(event, WeightsHandedOver)] == ["b"]
