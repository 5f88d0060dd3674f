"""Safe RLHF's algorithm over simulated services: what it asks of cost service and cost critic, and what it hands on."""

from typing import Any

import pytest

from asyncrl.algorithms import safe_rlhf
from asyncrl.controller.journal.ledger import Dropped
from asyncrl.controller.observers.events import SampleScored, StepBegan, StepDone
from asyncrl.errors import FleetFailed, PeerLost
from asyncrl.protocols.batch import BatchRef, Cuts
from asyncrl.protocols.messages import Score, ValueReport
from asyncrl.simulation.fakes.scoring import FakeCritic, FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests import golden
from tests.unit.scene import CONFIG, Scene


class Price(FakeReward):
    """A sample costs ten times its group and its member; those of member `missing` have no cost."""

    missing = -1

    async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
        await self.spend(self.delay)
        return [self._price(sample.group, sample.member) for sample in samples]

    def _price(self, group: int, member: int) -> Score:
        if member == self.missing:
            return Score(None, {}, "nobody knows its price")
        return Score(10.0 * group + member, {"price": 10.0 * group + member})


class SafeScene(Scene):
    def __init__(self) -> None:
        super().__init__(steps=4)
        self.algorithm = safe_rlhf.ALGORITHM
        self.cost = Price(0.2)
        self.with_critics(FakeCritic(0.3, 1.0, [self.generation], "cost"))

    def with_critics(self, cost_critic: FakeCritic) -> None:
        self.critic = FakeCritic(0.3, 1.0, [self.generation, cost_critic])
        self.cost_critic = cost_critic
        self.cost_critic.read_from((self.generation, self.critic, self.cost_critic))
        self.training = FakeTraining(
            StepCost(1.0), CONFIG.limit, [self.generation, self.critic, self.cost_critic], seed=0
        )


def test_what_trains_has_its_cost_and_values_of_both_critics() -> None:
    scene = SafeScene()
    scene.play()
    assert scene.gate.version == 4
    rows = [row for began in scene.told(StepBegan) for row in began.cuts.batch]
    assert len(rows) == 4 * CONFIG.batch
    for row in rows:
        assert row.cost == 10.0 * row.group + row.member
        assert "critic0.0" in row.place_of("values").owner
        assert "cost_critic0.0" in row.place_of("cost_values").owner
        assert "generation0.0" in row.place_of("versions").owner
    for told in scene.told(SampleScored):
        assert told.score.terms.keys() == {"coin", "cost/price"}


def test_both_critics_learn_once_beside_the_policy_what_it_trains() -> None:
    scene = SafeScene()
    scene.play()
    trained = {row.name: began.cuts.version for began in scene.told(StepBegan) for row in began.cuts.batch}
    assert scene.critic is not None
    assert scene.cost_critic is not None
    assert scene.critic.learnt == scene.cost_critic.learnt == trained
    for done in scene.told(StepDone):
        assert done.report.metrics["critic/updates"] == done.report.metrics["cost_critic/updates"] == 1
        assert done.seconds == pytest.approx(1.0)


def test_a_sample_without_a_cost_is_dropped_as_one_without_a_reward_is() -> None:
    scene = SafeScene()
    scene.cost.missing = 2  # type: ignore[union-attr]
    scene.play()
    assert scene.gate.version == 4
    assert all(row.member != 2 for began in scene.told(StepBegan) for row in began.cuts.batch)
    dropped = [event for event in scene.told(Dropped) if 2 in event.members]
    assert dropped
    assert {event.reason for event in dropped} == {"unscorable"}
    assert "nobody knows its price" in {told.score.error for told in scene.told(SampleScored)}


class Dying(FakeCritic):
    async def update(self, cuts: Cuts) -> ValueReport:
        raise PeerLost("cost_critic0.0 died")


def test_a_cost_critic_that_dies_ends_the_run() -> None:
    scene = SafeScene()
    scene.with_critics(Dying(0.3, 1.0, [scene.generation], "cost"))
    with golden.raises(FleetFailed, match=r"version 0: cost_critic0\.0"):
        scene.play()


def test_rows_of_everything_are_let_go_of() -> None:
    scene = SafeScene()
    scene.play()
    for host in (scene.generation, scene.critic, scene.cost_critic):
        assert host is not None
        assert host.stored_rows <= scene.gate.in_flight
