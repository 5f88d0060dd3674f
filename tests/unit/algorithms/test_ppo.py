"""PPO's algorithm over simulated services: what it asks of the critic, and what becomes of it when something is
lost."""

from dataclasses import replace

import pytest

from asyncrl.algorithms import ppo
from asyncrl.controller.observers.events import StepBegan, StepDone, StepLost
from asyncrl.errors import FleetFailed, LostRows, PeerLost
from asyncrl.protocols.batch import Cuts
from asyncrl.protocols.messages import StepReport, ValueReport
from asyncrl.simulation.fakes.scoring import FakeCritic
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests import golden
from tests.unit.scene import CONFIG, Scene


class PpoScene(Scene):
    """A scene with a critic, which takes `cost` seconds to learn; a step takes one."""

    def __init__(self, cost: float = 1.0, steps: int = 4) -> None:
        super().__init__(steps=steps)
        self.algorithm = ppo.ALGORITHM
        self.learner = self.critic = FakeCritic(0.3, cost, [self.generation])
        self.training = FakeTraining(StepCost(1.0), CONFIG.limit, [self.generation, self.critic], seed=0)


def test_what_the_policy_trains_the_critic_learns_once_from_the_same_version() -> None:
    scene = PpoScene()
    scene.play()
    assert scene.gate.version == 4
    trained = {row.name: began.cuts.version for began in scene.told(StepBegan) for row in began.cuts.batch}
    assert scene.learner.learnt == trained
    assert len(trained) == 4 * CONFIG.batch


def test_every_sample_that_trains_was_judged() -> None:
    scene = PpoScene()
    scene.play()
    for began in scene.told(StepBegan):
        assert all("critic0.0" in row.place_of("values").owner for row in began.cuts.batch)
        assert all("generation0.0" in row.place_of("versions").owner for row in began.cuts.batch)


def test_the_critic_learns_beside_the_policy_and_its_metrics_are_the_steps() -> None:
    scene = PpoScene(cost=1.0)
    scene.play()
    for done in scene.told(StepDone):
        assert done.report.metrics["critic/updates"] == 1
        assert done.seconds == pytest.approx(1.0)
    slow = PpoScene(cost=2.5)
    slow.play()
    assert [done.seconds for done in slow.told(StepDone)] == pytest.approx([2.5] * 4)


class LosingTraining(FakeTraining):
    """Finds rows gone in its first step."""

    asked = 0

    async def step(self, cuts: Cuts) -> StepReport:
        self.asked += 1
        if self.asked == 1:
            raise LostRows("one row is gone")
        return await super().step(cuts)


def test_a_lost_step_is_no_loss_of_the_critic_and_no_sample_is_learnt_twice() -> None:
    scene = PpoScene()
    scene.training = LosingTraining(StepCost(1.0), CONFIG.limit, [scene.generation, scene.learner], seed=0)
    scene.play()
    assert len(scene.told(StepLost)) == 1
    assert scene.gate.version == 4
    names = list(scene.learner.learnt)
    assert len(names) == len(set(names)) >= 4 * CONFIG.batch


class Forgetful(FakeCritic):
    """Finds rows gone in its first update."""

    asked = 0

    async def update(self, cuts: Cuts) -> ValueReport:
        self.asked += 1
        report = await super().update(cuts)
        return replace(report, skipped="rows lost", metrics={"critic/updates": 0.0}) if self.asked == 1 else report


def test_rows_that_only_the_critic_misses_do_not_hold_up_the_policy() -> None:
    scene = PpoScene()
    scene.critic = Forgetful(0.3, 1.0, [scene.generation])
    scene.training = FakeTraining(StepCost(1.0), CONFIG.limit, [scene.generation, scene.critic], seed=0)
    scene.play()
    assert scene.gate.version == 4
    assert [done.report.metrics["critic/updates"] for done in scene.told(StepDone)] == [0, 1, 1, 1]


class Dying(FakeCritic):
    async def update(self, cuts: Cuts) -> ValueReport:
        raise PeerLost("critic0.0 died")


def test_a_critic_that_dies_ends_the_run() -> None:
    scene = PpoScene()
    scene.critic = Dying(0.3, 1.0, [scene.generation])
    with golden.raises(FleetFailed, match=r"version 0: critic0\.0"):
        scene.play()
