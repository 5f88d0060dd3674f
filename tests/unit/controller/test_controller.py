"""The controller over simulated services: what ends a run, what it survives, and in which order things happen."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from asyncrl.algorithms import grpo
from asyncrl.controller import controller
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.gate.group_state import Stage
from asyncrl.controller.journal import ledger
from asyncrl.controller.journal.ledger import AttemptStarted, Drawn, Dropped, InFlight, Trained
from asyncrl.controller.observers.events import Event, GroupPoisoned, StepBegan, StepDone, Warned
from asyncrl.controller.rollouts import Attempt
from asyncrl.errors import (
    PeerLost,
    PolicyMismatch,
    Refused,
    RewardError,
)
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import Array, BatchRef, Cuts, Place, SampleName
from asyncrl.protocols.messages import Score, StepReport
from asyncrl.simulation import virtual_loop
from asyncrl.simulation.fakes.generation import FakeGeneration, constant, stragglers
from asyncrl.simulation.fakes.scoring import FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests import golden
from tests.unit.scene import CONFIG, Scene, settings


def test_a_run_trains_its_steps_and_writes_down_what_is_in_flight() -> None:
    scene = Scene(steps=3)
    scene.play()
    assert [record.version for record in scene.records(Trained)] == [1, 2, 3]
    (in_flight,) = scene.records(InFlight)
    assert in_flight.groups == scene.journal.ledger.in_flight() != ()
    assert scene.store.synced == scene.store.size


def test_draws_wait_for_releases_so_that_rows_keep_within_their_slots() -> None:
    class Slow(FakeGeneration):
        most = 0

        def keep(self, sample: SampleName, columns: Mapping[str, Array]) -> Place:
            self.most = max(self.most, self.stored_rows + 1)
            return super().keep(sample, columns)

        async def release(self, samples: list[SampleName], oldest: int) -> None:
            await asyncio.sleep(60.0)
            await super().release(samples, oldest)

    scene = Scene(steps=12)
    scene.generation = slow = Slow(16, 0.1, constant(20))
    scene.training = FakeTraining(StepCost(1.0), CONFIG.limit, [slow], seed=0)
    scene.play()
    assert slow.most == CONFIG.kept
    assert scene.gate.version == 12


def test_other_tasks_run_while_many_groups_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "DRAWN_AT_ONCE", 16)
    scene = Scene(replace(CONFIG, groups=48, members=2, slots=128), steps=1)
    drawn_in: list[int] = []

    def observe(event: Event) -> None:
        if not drawn_in or drawn_in[-1] < 0:
            drawn_in.append(0)
            asyncio.get_running_loop().call_soon(drawn_in.append, -1)
        drawn_in[-1] += isinstance(event, Drawn)

    scene.observe = observe
    scene.play()
    assert max(drawn_in) == 16
    assert scene.gate.version == 1


def test_a_batch_carries_rewards_advantages_and_the_denominators_of_all() -> None:
    scene = Scene()
    scene.play()
    cuts: Cuts = scene.told(StepBegan)[0].cuts
    assert (cuts.samples, cuts.tokens) == (8, 160)
    for group in {row.group for row in cuts.batch}:
        rows = [row for row in cuts.batch if row.group == group]
        mean = sum(row.reward or 0.0 for row in rows) / len(rows)
        assert [row.advantage for row in rows] == pytest.approx([(row.reward or 0.0) - mean for row in rows])
    assert scene.records(Trained)[0].advantages == tuple(row.advantage for row in cuts.batch)


@pytest.mark.trap("truncated")
def test_masked_truncated_samples_are_in_no_denominator() -> None:
    scene = Scene()
    scene.generation = FakeGeneration(16, 0.1, stragglers(10, 0.5, 2))  # 20 tokens are the most: truncated
    scene.training = FakeTraining(StepCost(1.0), 1, [scene.generation], seed=0)
    scene.config = settings(3, algorithm={"mask_truncated": True})
    scene.play()
    cuts: Cuts = scene.told(StepBegan)[0].cuts
    whole = [row for row in cuts.batch if row.finish == "stop"]
    assert 0 < len(whole) < len(cuts)
    assert (cuts.samples, cuts.tokens) == (len(whole), 10 * len(whole))
    for row in whole:
        rewards = [other.reward or 0.0 for other in cuts.batch if other.group == row.group]
        assert row.advantage == pytest.approx((row.reward or 0.0) - sum(rewards) / len(rewards)), (
            "they are compared with"
        )


class Drifting(FakeTraining):
    """Its policy moves further from the sampler's with every step."""

    async def step(self, cuts: Cuts) -> StepReport:
        report = await super().step(cuts)
        return replace(report, metrics={"mismatch/kl": 0.1 * report.version})


def test_policies_that_drift_apart_are_told_once_and_then_end_the_run() -> None:
    scene = Scene(steps=9)
    scene.training = Drifting(StepCost(1.0), CONFIG.limit, [scene.generation], seed=0)
    scene.config = settings(9, mismatch={"warn_kl": 0.15, "stop_kl": 0.35})
    with golden.raises(PolicyMismatch):
        scene.play()
    (told,) = scene.told(Warned)
    assert told.text.startswith("step 2: ")
    assert [record.version for record in scene.records(Trained)] == [1, 2, 3, 4], "what was trained is written down"


def test_groups_of_equal_rewards_are_replaced_and_written_down() -> None:
    scene = Scene(replace(CONFIG, members=2, need_signal=True), steps=5)
    scene.play()
    dropped = [record for record in scene.records(ledger.Dropped) if record.reason == "no_signal"]
    assert dropped
    for begun in scene.told(StepBegan):
        assert all(row.advantage != 0 for row in begun.cuts.batch)
    assert {sample for sample, _ in scene.training.trained} & {record.group for record in dropped} == set()


def test_nothing_runs_between_iterations_and_nothing_is_drawn_before_the_first() -> None:
    scene = Scene()
    seen = list[tuple[int, int, int]]()

    async def between(version: int) -> None:
        await asyncio.sleep(5)  # what is in flight goes on meanwhile
        seen.append((version, scene.gate.counts[Stage.TRAINING], len(scene.told(Drawn))))

    scene.between = between
    scene.play()
    assert [version for version, _, _ in seen] == [0, 1, 2, 3]
    assert all(training == 0 for _, training, _ in seen)
    assert seen[0][2] == 0 < seen[1][2]


def test_the_journal_knows_of_a_step_before_the_gate_does() -> None:
    scene = Scene()
    whole = scene.gate.trained

    def trained(cuts: Any, version: int) -> None:
        assert scene.journal.ledger.version == version
        whole(cuts, version)

    scene.gate.trained = trained  # type: ignore[method-assign]
    scene.play()
    drawn_after = [event.version for event in scene.told(Drawn)]
    assert drawn_after == sorted(drawn_after)
    assert 1 in drawn_after


def test_stop_ends_the_run_after_the_running_iteration() -> None:
    scene = Scene(steps=1000)

    async def train(fleet: Fleet, control: Controller) -> None:
        async for iteration in control.iterations():
            with iteration as cuts:
                if control.version == 2:
                    control.stop()
                control.trained(await fleet.training.step(cuts))

    scene.algorithm = Algorithm(grpo.roll_out, train)
    scene.play()
    assert scene.gate.version == 3
    assert len(scene.records(InFlight)) == 1


class FailingFleet(FakeReward):
    """The run fails, and in the turns of the loop that follow it hears that the worker that holds the rows died."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(0.0)
        self.scene = scene

    async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
        loop = cast(virtual_loop.VirtualLoop, asyncio.get_running_loop())
        lose = partial(self.scene.controller.worker_lost, self.scene.generation.instance, "killed")
        for turns in range(8):
            loop.after_turns(turns, lose)
        raise RewardError("the reward function failed")


def test_a_worker_that_dies_while_a_run_fails_hides_nothing_of_the_failure() -> None:
    scene = Scene()
    scene.reward = FailingFleet(scene)
    with pytest.raises(RewardError, match="the reward function failed"):
        scene.play()


async def poisonous(fleet: Fleet, control: Controller, group: Attempt) -> None:
    """Group 1 kills whoever samples it."""
    if group.prompts.id == 1:
        raise PeerLost(f"died in attempt {group.prompts.attempt}")
    await grpo.roll_out(fleet, control, group)


async def forget_every_second_sample(fleet: Fleet, control: Controller, group: Attempt) -> None:
    async for samples in fleet.generation.generate(group.prompts):
        control.generated(samples)
        for row in samples:
            if group.prompts.id != 1 or row.member % 2:
                control.ready(BatchRef((row,)), [Score(float(row.member), {})])


@pytest.mark.parametrize(
    ("roll_out", "members", "why"),
    [
        (poisonous, {0, 1, 2, 3}, "died in attempt 2"),
        (forget_every_second_sample, {0, 2}, "the attempt ended without samples (0, 2)"),
    ],
)
def test_a_group_that_fails_three_times_is_dropped_with_its_prompt(roll_out: Any, members: set[int], why: str) -> None:
    scene = Scene()
    scene.algorithm = Algorithm(roll_out, grpo.train)
    scene.play()
    assert scene.told(GroupPoisoned) == [GroupPoisoned(1, "prompt 1", why)]
    (dropped,) = [event for event in scene.told(Dropped) if event.reason == "poison"]
    assert dropped.group == 1
    assert members <= {*dropped.members}
    trained = {row.key for event in scene.told(StepDone) for row in event.cuts.batch}
    assert trained.isdisjoint((1, member) for member in members)
    assert scene.gate.version == 3


def test_a_group_that_loses_finished_samples_over_and_over_is_not_poison() -> None:
    scene = Scene()

    async def between(version: int) -> None:
        for _ in range(5):
            await asyncio.sleep(30)  # everything in flight is ready
            scene.controller.worker_lost(scene.generation.instance, "killed")
            scene.controller.worker_lives("generation", scene.generation.instance)

    scene.between = between
    scene.play()
    failed = scene.told(AttemptStarted)
    assert max(Counter(event.group for event in failed).values()) >= 5
    assert {event.reason for event in failed} == {f"{scene.generation.instance}: killed"}
    assert scene.told(GroupPoisoned) == []


async def die_three_times(scene: Scene) -> None:
    """While the first groups run; each time for a while."""
    for _ in range(3):
        await asyncio.sleep(12)
        await scene.lose_the_generator()


def test_slow_groups_that_run_in_a_worker_which_dies_three_times_in_a_row_are_not_poison() -> None:
    scene = Scene()
    scene.generation = FakeGeneration(16, 1.0, constant(20))  # 20 seconds each
    scene.training = FakeTraining(StepCost(1.0), 1, [scene.generation], seed=0)

    async def train(fleet: Fleet, control: Controller) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(die_three_times(scene))
            await grpo.train(fleet, control)

    scene.algorithm = Algorithm(grpo.roll_out, train)
    scene.play()
    failed = Counter(event.group for event in scene.told(AttemptStarted))
    assert max(failed.values()) >= 3
    assert scene.told(GroupPoisoned) == []
    assert scene.gate.version == 3


def test_a_report_of_another_version_is_refused() -> None:
    class Liar(FakeTraining):
        async def step(self, cuts: Cuts) -> StepReport:
            return replace(await super().step(cuts), version=7)

    scene = Scene()
    scene.training = Liar(StepCost(1.0), 1, [scene.generation], seed=0)
    with golden.raises(Refused):
        scene.play()


def test_generation_is_told_that_the_gate_holds_it_back() -> None:
    scene = Scene()
    told = list[str]()

    async def idle_because(state: str) -> None:
        told.append(state)

    scene.generation.idle_because = idle_because  # type: ignore[method-assign]
    scene.play()
    assert told == ["blocked", "starved"]
