"""New weights reach every reader, one that holds on is replaced, and one to which they do not come is left out."""

import asyncio
from collections.abc import Callable, Mapping
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
    """Takes weights after as many seconds as `answers` says, one after the other, or raises what they are; then at
    once. canary: of its answers. keeps: goes on with what it reads."""

    def __init__(self, name: str, answers: list[float | AsyncrlError]) -> None:
        self.name = name
        self.answers = answers
        self.errors: list[AsyncrlError] = []
        """Raised after `after` seconds for every version but the first, before anything is taken."""
        self.after = 0.0
        self.canary: float | None = None
        self.keeps = False
        self.told: list[Published] = []

    async def use_weights(self, published: Published) -> Using:
        self.told.append(published)
        if self.errors and published.version > 1:
            await asyncio.sleep(self.after)
            raise self.errors.pop(0)
        answer = self.answers.pop(0) if self.answers else 0.0
        if isinstance(answer, AsyncrlError):
            raise answer
        await asyncio.sleep(answer)
        return Using(() if self.keeps else (self.name,), published.version, canary=self.canary)


class Readers(Generation):
    def __init__(self, answers: Mapping[str, list[Any]]) -> None:
        self.each = {name: Reader(name, list(answers.get(name, ()))) for name in ("a", "b", "c")}

    def replica_of(self, instance: str) -> Generation:
        return self.each[instance]

    def asked(self, reader: str) -> list[int]:
        return [published.version for published in self.each[reader].told]


class Leases(Training):
    """Takes `seconds` for each call. fails: the error of a call, by its number. calls: readers and version."""

    def __init__(self, seconds: float = 0.0, fails: Mapping[int, AsyncrlError] | None = None) -> None:
        self.seconds = seconds
        self.fails = fails or {}
        self.calls: list[tuple[set[str], int]] = []
        self.using_now: dict[str, int] = {}

    async def using(self, readers: tuple[str, ...], version: int) -> None:
        self.calls.append(({*readers}, version))
        await asyncio.sleep(self.seconds)
        if len(self.calls) in self.fails:
            raise self.fails[len(self.calls)]
        self.using_now |= dict.fromkeys(readers, version)


class Scene:
    """Readers a and b of one publisher; c exists."""

    def __init__(self, leases: Leases | None = None, **answers: list[Any]) -> None:
        self.readers = Readers(answers)
        self.leases = leases or Leases()
        self.events: list[Event] = []
        self.killed: dict[str, float] = {}
        self.left_out: list[tuple[str, str]] = []
        self.publisher = WeightPublisher(
            Fleet(self.readers, Reward(), self.leases),
            10.0,
            self.events.append,
            lambda reader: self.killed.update({reader: asyncio.get_running_loop().time()}),
            lambda reader, why: self.left_out.append((reader, why)),
        )
        for reader in ("a", "b"):
            self.publisher.join(reader)

    def failing(self, reader: str, *errors: AsyncrlError, after: float = 0.0) -> None:
        self.readers.each[reader].errors = list(errors)
        self.readers.each[reader].after = after

    @property
    def warnings(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Warned)]

    @property
    def handed_over(self) -> dict[str, WeightsHandedOver]:
        return {event.reader: event for event in self.events if isinstance(event, WeightsHandedOver)}

    @property
    def out(self) -> list[tuple[str, bool]]:
        return [(reader, bool(why)) for reader, why in self.left_out]

    def announce(self, version: int, transfer: float = 0.0) -> None:
        self.publisher.announce(Published(0, version, "arena", version % 2, "", transfer=transfer))

    def play(self, *script: int | float | Callable[[], object]) -> "Scene":
        """Announces versions, which are whole numbers, waits so many seconds, and calls functions."""

        async def act() -> None:
            for each in script:
                if isinstance(each, int):
                    self.announce(each)
                elif isinstance(each, float):
                    await asyncio.sleep(each)
                else:
                    each()

        async def main() -> None:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(self.publisher.run())
                await act()
                running.cancel()

        virtual_loop.run(main())
        return self


def test_what_readers_use_is_told_to_the_trainer() -> None:
    scene = Scene(a=[1.0], b=[2.0]).play(1, 3.0)
    assert scene.leases.using_now == {"a": 1, "b": 1}
    handed_over = [WeightsHandedOver(1, "a", pytest.approx(1.0)), WeightsHandedOver(1, "b", pytest.approx(2.0))]
    assert scene.events == handed_over


@pytest.mark.parametrize(
    ("delay", "transfer", "killed"),
    [(1000.0, 0.0, ["a"]), (15.0, 0.0, ["a"]), (15.0, 4.0, ["a"]), (15.0, 6.0, [])],
)
def test_readers_have_the_time_that_the_bytes_of_a_version_take(
    delay: float, transfer: float, killed: list[str]
) -> None:
    scene = Scene(a=[delay])
    assert [*scene.play(lambda: scene.announce(1, transfer), 30.0).killed] == killed


def test_what_a_reader_says_of_the_canary_is_observed() -> None:
    scene = Scene()
    scene.readers.each["b"].canary = 0.25
    assert {name: event.canary for name, event in scene.play(1, 1.0).handed_over.items()} == {"a": None, "b": 0.25}


def test_readers_jump_to_the_newest_and_hear_of_none_that_was_overtaken_on_its_way() -> None:
    assert Scene(a=[5.0]).play(1, 1.0, 2, 1.0, 3, 11.0).readers.asked("a") == [1, 3]
    readers = Scene().play(2, 1, 1.0).readers
    assert readers.asked("a") == readers.asked("b") == [2]


def test_a_reader_that_holds_on_is_killed_and_no_other_one_waits_for_it() -> None:
    scene = Scene(a=[0.0, 1000.0])

    def look() -> None:
        assert scene.leases.using_now == {"a": 1, "b": 3}

    scene.play(1, 1.0, 2, 1.0, 3, 1.0, look, 30.0)
    assert scene.killed == {"a": pytest.approx(11.0)}, "it was called with version 2 after one second"
    assert scene.readers.asked("a") == [1, 2], "it is dying: until it is dead it holds what the trainer knows of"
    assert scene.readers.asked("b") == [1, 2, 3]


def test_a_death_is_not_the_publishers_business() -> None:
    scene = Scene(a=[PeerLost("generation died")]).play(1, 1.0, 1, 1.0)
    assert scene.readers.asked("a") == [1, 1]
    assert scene.readers.asked("b") == [1], "it has what it is to read"
    assert scene.leases.using_now == {"a": 1, "b": 1}
    assert scene.killed == {}


FAULTS = [
    WeightsError("generation0[0]: weights-0-1.safetensors is damaged"),
    RemoteError("OutOfMemoryError", "CUDA out of memory", "generation0", 0, ""),
    ArenaFull("no slot"),
    WireError("a frame of 18054040 bytes"),
]


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_an_error_of_one_reader_ends_that_reader_and_the_same_of_all_ends_the_run(error: AsyncrlError) -> None:
    one = Scene()
    one.failing("b", error)
    one.play(1, 1.0, 2, 30.0)
    assert [*one.killed] == ["b"]
    assert one.readers.asked("a") == [1, 2]
    both = Scene()
    both.failing("a", error)
    both.failing("b", error)
    with pytest.raises(BaseExceptionGroup) as ended:
        both.play(1, 1.0, 2, 30.0)
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
    scene = Scene()
    for name in ("a", "b"):
        scene.failing(name, *[error] * tries, after=7.0)
    scene.play(1, 1.0, 2, 300.0)
    assert scene.killed == {}
    assert scene.left_out == []
    assert scene.leases.using_now == {"a": 2, "b": 2}
    assert scene.readers.asked("a") == [1, *[2] * tries, 2]
    assert bool(scene.warnings) == (tries > 2), "a hiccup is no matter"


@pytest.mark.parametrize("error", [LATE, LOST])
def test_a_pair_that_does_not_meet_is_named_and_its_reader_left_out_until_it_does(error: AsyncrlError) -> None:
    scene = Scene()
    scene.failing("b", *[error] * 6, after=3.0)
    scene.play(*(each for version in range(1, 50) for each in (version, 10.0)))
    assert scene.killed == {}
    assert scene.out == [("b", True), ("b", False)]
    named, back = scene.warnings
    assert f"do not come to b from arena: {error}. It gets no samples until it has new weights" in named
    assert back == "b has the weights again, and gets samples"
    assert scene.readers.asked("a") == list(range(1, 50)), "nobody waits for the other one"
    assert scene.leases.using_now == {"a": 49, "b": 49}


def test_a_reader_whose_rows_the_trainer_does_not_get_is_left_out_until_weights_come_to_it() -> None:
    scene = Scene()

    def unread() -> None:
        scene.publisher.unread(["a", "nobody"], "the owner of tcp://h2#a is gone")
        scene.publisher.unread(["a", "b"], "the owner of tcp://h4#b is gone")
        assert scene.out == [("a", True)], "the last one goes on"

    scene.play(1, 1.0, unread, 2, 1.0)
    assert scene.out == [("a", True), ("a", False)]
    named, back = scene.warnings
    assert named.startswith("rows do not come to the trainer from a: the owner of tcp://h2#a is gone")
    assert back == "a has the weights again, and gets samples"


def test_a_reader_that_is_replaced_is_offered_nothing_more() -> None:
    scene = Scene()
    scene.failing("b", *[LOST] * 100)
    asked: list[list[int]] = []
    look = lambda: asked.append(scene.readers.asked("b"))  # noqa: E731
    scene.play(1, 1.0, 2, 60.0, look, lambda: scene.publisher.forget("b"), 600.0, look)
    assert asked[0] == asked[1]


def test_a_reader_that_joins_holds_its_version_before_it_is_told_of_it() -> None:
    scene = Scene(a=[5.0], b=[5.0])

    def look() -> None:
        assert scene.readers.asked("a") == [1]
        assert scene.leases.using_now == {"a": 1, "b": 1}, "attached, while their answers are on the way"

    scene.play(1, 1.0, look, 5.0)


def test_a_trainer_that_does_not_answer_kills_no_reader() -> None:
    scene = Scene(Leases(fails={1: DeadlineExceeded("training0.0 did not answer using within 600 s")}))
    with pytest.raises(ExceptionGroup) as raised:
        scene.play(1, 30.0)
    assert isinstance(root_cause(raised.value), DeadlineExceeded)
    assert scene.killed == {}


def test_a_reader_that_dies_after_its_answer_is_not_attached_again() -> None:
    scene = Scene(Leases(1.0))
    # Attached, and its answer is on its way to the trainer.
    scene.play(1, 1.5, lambda: scene.publisher.forget("a"), 5.0)
    assert [*scene.handed_over] == ["b"]


@pytest.mark.parametrize("refused", [False, True])
def test_readers_that_answer_during_a_call_to_the_trainer_share_the_next_one_and_its_fate(refused: bool) -> None:
    leases = Leases(1.0, {3: Refused("the arena holds [2, 3]")} if refused else None)
    scene = Scene(leases, a=[1.0], b=[1.2], c=[1.8])
    scene.play(lambda: scene.publisher.join("c"), 1, 10.0)
    assert leases.calls == [({"a", "b", "c"}, 1), ({"a"}, 1), ({"b", "c"}, 1)], "attached, then reported"
    seconds = {name: event.seconds for name, event in scene.handed_over.items()}
    assert seconds == pytest.approx({"a": 3.0, **({} if refused else {"b": 4.0, "c": 4.0})})


def test_a_dead_reader_is_reported_no_more() -> None:
    """A report after the end of its lease would begin another lease, which nobody ends."""
    scene = Scene(Leases(1.0), a=[1.0], b=[1.2])
    # b has answered, while the trainer takes what a reads.
    scene.play(1, 2.5, lambda: scene.publisher.forget("b"), 10.0)
    assert scene.leases.calls == [({"a", "b"}, 1), ({"a"}, 1)]


def test_weights_are_kept_for_those_that_are_told() -> None:
    scene = Scene(a=[3.0])
    scene.play(1, lambda: scene.publisher.join("c"), 1.0, lambda: scene.publisher.join("d"), 5.0)
    for name, reader in scene.readers.each.items():
        (published,) = reader.told
        assert published.readers == (name,)
    assert set(scene.leases.using_now) == {"a", "b", "c"}


def test_a_reader_that_goes_on_with_what_it_reads_took_over_nothing() -> None:
    scene = Scene()
    scene.readers.each["a"].keeps = True
    assert [*scene.play(1, 1.0).handed_over] == ["b"]
