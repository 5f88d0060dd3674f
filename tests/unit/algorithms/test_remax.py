"""ReMax's algorithm over simulated services: what the greedy answer decides, and where it never comes."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.algorithms import remax
from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.controller import Controller
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.ledger import AttemptStarted, Compared, Dropped
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.observers.events import GroupFinished, SampleScored, StepBegan, StepDone
from asyncrl.controller.rollouts import Attempt
from asyncrl.controller.sample_tracker import NO_GREEDY, SampleTracker
from asyncrl.errors import PeerLost
from asyncrl.fleet.fleet import Fleet
from asyncrl.objectives.advantages import greedy_baseline
from asyncrl.protocols.batch import GREEDY, Array, BatchRef, Place, RowRef, SampleName
from asyncrl.protocols.messages import PromptGroup, Score
from asyncrl.simulation.fakes.generation import FakeGeneration, constant
from asyncrl.simulation.fakes.scoring import FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests import golden
from tests.unit.scene import Scene

CONFIG = GateConfig(groups=2, members=4, limit=1, policy="mask", slots=16, cut_at=2, baseline=1, greedy=True)


class Judge(FakeReward):
    """The member is the reward of a sample, 0.5 that of a greedy answer, which takes `later` seconds longer.

    greedy: groups whose greedy answer was judged, with the attempt.
    """

    def __init__(self, later: float = 0.0, unscorable: tuple[int, ...] = ()) -> None:
        super().__init__(0.1)
        self.later, self.without, self.greedy = later, unscorable, list[tuple[int, int]]()

    async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
        if samples.rows[0].member != GREEDY:
            return [Score(float(sample.member), {}) for sample in samples]
        await self.spend(0.1 + self.later)
        (answer,) = samples
        self.greedy.append((answer.group, answer.attempt))
        return [Score(None if answer.group in self.without else 0.5, {})]


class RemaxScene(Scene):
    def __init__(self, reward: Judge, steps: int = 3) -> None:
        super().__init__(CONFIG, steps)
        self.algorithm = remax.ALGORITHM
        self.estimate = greedy_baseline
        self.reward = reward


def test_every_sample_is_compared_with_the_greedy_answer_to_its_prompt() -> None:
    scene = RemaxScene(judge := Judge())
    scene.play()
    trained = [row for began in scene.told(StepBegan) for row in began.cuts.batch]
    assert len(trained) == 3 * CONFIG.batch
    assert [row.advantage for row in trained] == [row.member - 0.5 for row in trained]
    assert {group for group, _ in judge.greedy} >= {row.group for row in trained}
    assert {record.reward for record in scene.records(Compared)} == {0.5}


@pytest.mark.trap("greedy_training")
def test_greedy_answers_never_enter_the_loss_nor_what_is_counted() -> None:
    asked: list[PromptGroup] = []

    class Asked(FakeGeneration):
        def generate(self, prompts: PromptGroup) -> Any:
            asked.append(prompts)
            return super().generate(prompts)

    scene = RemaxScene(Judge())
    scene.generation = Asked(CONFIG.slots, 0.1, constant(20))
    scene.training = FakeTraining(StepCost(1.0), CONFIG.limit, [scene.generation], seed=0)
    scene.play()
    greedy = [p for p in asked if GREEDY in p.members]
    sampled = [p for p in asked if GREEDY not in p.members]
    assert [prompts.members for prompts in greedy] == [(GREEDY,)] * len(sampled)
    assert {prompts.temperature for prompts in greedy} == {0.0}
    assert {prompts.temperature for prompts in sampled} == {1.0}
    assert len(scene.training.trained) == 3 * CONFIG.batch
    assert all(member >= 0 for _, member in scene.training.trained)
    assert all(told.sample.member >= 0 for told in scene.told(SampleScored))
    assert all(len(done.cuts.batch) == CONFIG.batch == done.cuts.samples for done in scene.told(StepDone))
    ledger = scene.journal.ledger
    assert ledger.drawn == len(sampled) * CONFIG.members
    assert ledger.balanced()


def row(group: int, member: int, attempt: int = 0) -> RowRef:
    place = Place("shm://generation0.0-0-1.rows", 8 * group + member + 1, 1, ("text",))
    return RowRef(group, member, attempt, 0, 1, 1, 0, 0, "stop", (place,))


class Held:
    """Books of one group, and the rows that they let go of."""

    def __init__(self) -> None:
        self.released: list[SampleName] = []
        self.gate, self.journal = Gate(CONFIG), Journal(MemoryStore())
        self.moved = 0
        self.tracker = SampleTracker(
            self.gate, self.journal, lambda event: None, self.released.extend, self.move, self.move
        )
        self.group = self.tracker.draw()

    def move(self) -> None:
        self.moved += 1

    def scored(self, members: tuple[int, ...], attempt: int = 0) -> None:
        for member in members:
            self.tracker.generated([row(self.group, member, attempt)])
            self.tracker.scored(row(self.group, member, attempt), Score(1.0, {}))


@pytest.mark.trap("greedy_training")
def test_a_greedy_answer_handed_on_as_a_sample_is_refused() -> None:
    held = Held()
    with golden.raises(AssertionError, match="`compared`"):
        held.tracker.generated([row(held.group, GREEDY)])
    with golden.raises(AssertionError, match="`ready`"):
        held.tracker.compared(row(held.group, 0), Score(1.0, {}))


def test_no_part_of_a_group_trains_before_it_can_be_compared() -> None:
    held = Held()
    held.gate.stop_drawing()
    held.scored((0, 1, 2, 3))
    assert held.tracker.pick() is None
    assert not held.gate.exhausted, "the reward of the greedy answer is still to come"
    assert held.tracker.preview() == []
    moved = held.moved
    held.tracker.compared(row(held.group, GREEDY), Score(0.25, {}))
    assert held.moved > moved, "whoever waits for a batch looks again"
    assert held.tracker.pick() == ((held.group, (0, 1, 2, 3)),)
    (cut,) = held.tracker.rewarded([(held.group, (0, 1, 2, 3))], lambda row: row.member != 3)
    assert cut.greedy == 0.25
    assert [cut.tokens[member] > 0 for member in range(4)] == [True, True, True, False]


def test_the_row_of_a_greedy_answer_is_released_once_judged_and_when_its_attempt_is_given_up() -> None:
    held = Held()
    held.tracker.restart(held.group, "its worker died")
    assert (held.group, GREEDY, 0) in held.released
    held.released.clear()
    held.tracker.compared(row(held.group, GREEDY, attempt=0), Score(1.0, {}))
    assert held.released == [(held.group, GREEDY, 0)], "a late answer is let go of, and refused"
    assert held.gate.awaits(held.group)
    held.released.clear()
    held.tracker.drop(held.group, (0, 1, 2, 3), "poison")
    assert (held.group, GREEDY, 1) in held.released
    assert held.tracker.gate.finished(held.group)


def test_a_retried_group_keeps_the_reward_it_was_compared_with_also_when_the_run_is_resumed() -> None:
    held = Held()
    held.tracker.compared(row(held.group, GREEDY), Score(0.25, {}))
    held.tracker.restart(held.group, "its worker died")
    held.tracker.compared(row(held.group, GREEDY, attempt=1), Score(0.75, {}))
    assert held.gate.group(held.group).greedy == 0.25, (
        "the first one counts, so that all its parts compare with the same"
    )
    (restored,) = Journal(held.journal.store).ledger.groups.values()
    resumed = Gate(CONFIG, 0, 1)
    resumed.restore(restored)
    assert (resumed.group(held.group).greedy, resumed.awaits(held.group)) == (0.25, False)
    resumed = Gate(CONFIG, 0, 1)
    resumed.restore(replace(restored, greedy=None))
    assert resumed.awaits(held.group), "one that was not compared before asks again"


def test_a_group_whose_greedy_answer_has_no_reward_is_dropped_by_that_name() -> None:
    scene = RemaxScene(Judge(later=1.0, unscorable=(1,)))
    scene.play()
    dropped = [event for event in scene.told(Dropped) if event.reason == NO_GREEDY]
    assert [(event.group, event.members) for event in dropped] == [(1, (0, 1, 2, 3))]
    assert scene.records(Dropped) == [Dropped(1, (0, 1, 2, 3), "greedy_unscorable")]
    assert GroupFinished(1) in scene.events
    assert scene.gate.version == 3
    assert all(row.group != 1 for began in scene.told(StepBegan) for row in began.cuts.batch)


class Once(Judge):
    """The worker that judges the first greedy answer dies."""

    async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
        if samples.rows[0].member == GREEDY and not self.greedy:
            self.greedy.append((-1, -1))
            raise PeerLost("reward0.0 died")
        return await super().score(samples, row)


def test_a_greedy_answer_that_was_lost_is_generated_again_and_no_other_is() -> None:
    scene = RemaxScene(judge := Once())
    scene.play()
    (failed,) = scene.told(AttemptStarted)
    assert (failed.group, 1) in judge.greedy
    assert [(group, attempt) for group, attempt in judge.greedy if attempt > 0] == [(failed.group, 1)]
    assert scene.gate.version == 3


class Fragile(Judge):
    """The worker that judges dies once, after the first greedy answer and before any sample of its group."""

    died = False

    async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
        if samples.rows[0].member != GREEDY:
            await self.spend(1.0)
            if not self.died:
                self.died = True
                raise PeerLost("reward0.0 died")
        return await super().score(samples, row)


def test_a_retried_group_that_was_compared_generates_no_other_greedy_answer() -> None:
    scene = RemaxScene(judge := Fragile())
    scene.generation = FakeGeneration(64, 0.1, constant(20))  # a slot for each: none waits
    scene.training = FakeTraining(StepCost(1.0), CONFIG.limit, [scene.generation], seed=0)
    scene.play()
    (failed,) = scene.told(AttemptStarted)
    assert [attempt for group, attempt in judge.greedy if group == failed.group] == [0]
    assert scene.gate.version == 3


def test_an_algorithm_that_forgets_the_greedy_answer_is_told_so() -> None:
    async def forgetful(fleet: Fleet, control: Controller, group: Attempt) -> None:
        async for samples in fleet.generation.generate(group.prompts):
            control.generated(samples)
            await remax.score(fleet, control, group, samples)

    scene = RemaxScene(Judge())
    scene.algorithm = replace(remax.ALGORITHM, roll_out=forgetful)

    def seen(event: Any) -> None:
        scene.events.append(event)
        if isinstance(event, AttemptStarted):
            raise LookupError(event.reason)

    scene.observe = seen
    with golden.raises(LookupError):
        scene.play()


@pytest.mark.parametrize("later", [0.0, 8.0, 30.0])
def test_draws_wait_for_releases_so_that_rows_with_greedy_ones_among_them_keep_within_their_slots(later: float) -> None:
    class Slow(FakeGeneration):
        most = 0

        def keep(self, sample: SampleName, columns: Mapping[str, Array]) -> Place:
            place = super().keep(sample, columns)
            self.most = max(self.most, self.stored_rows)
            return place

        async def release(self, samples: list[SampleName], oldest: int) -> None:
            await asyncio.sleep(60.0)
            await super().release(samples, oldest)

    scene = RemaxScene(Judge(later), steps=12)
    scene.generation = slow = Slow(64, 0.1, constant(20))
    scene.training = FakeTraining(StepCost(1.0), CONFIG.limit, [slow], seed=0)
    scene.play()
    assert (CONFIG.rows, CONFIG.kept) == (5, (CONFIG.cap + 2) * 5)
    assert CONFIG.cap * CONFIG.members <= slow.most <= CONFIG.kept
    assert scene.gate.version == 12
