"""The end of a run whose step takes an hour: its newest version is the one to save, and nothing is trained twice."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.algorithms import grpo, ppo
from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.gate.group_state import Stage
from asyncrl.controller.journal.ledger import Trained
from asyncrl.controller.observers.events import StepLost
from asyncrl.errors import FleetFailed
from asyncrl.fleet.fleet import Fleet
from asyncrl.objectives.advantages import plain_rewards
from asyncrl.protocols.batch import Cuts
from asyncrl.protocols.messages import CUT_SHORT, StepReport, TrainedSample
from asyncrl.simulation.fakes.scoring import FakeCritic
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests.unit.scene import CONFIG, Scene, settings

STOPS = 500.0
GRACE = 7.0
"""Seconds of virtual time at which the run is told to end, and until it no longer waits."""


class Endless(FakeTraining):
    """Ends no step from `version` on before its event is set."""

    def __init__(self, scene: Scene, version: int = 2) -> None:
        peers = [scene.generation, *filter(None, [scene.critic])]
        super().__init__(StepCost(1.0), scene.gate.config.limit, peers, seed=0)
        self.ends = asyncio.Event()
        self.endless = version

    async def spend(self, seconds: float) -> None:
        await super().spend(seconds)
        if self.version >= self.endless:
            await self.ends.wait()


def ended(scene: Scene, then: Callable[[Scene], Any] = lambda scene: None) -> float:
    """Plays a run that is told to end. Returns the seconds that it took from then on. then: called at that moment."""

    async def between(version: int) -> None:
        if version == 0:
            loop = asyncio.get_running_loop()
            loop.call_at(STOPS, lambda: (scene.controller.stop(), then(scene)))
            loop.call_at(STOPS + GRACE, lambda: scene.controller.stop_now())

    times: list[float] = []
    algorithm = scene.algorithm

    async def train(fleet: Fleet, control: Controller) -> None:
        try:
            await algorithm.train(fleet, control)
        finally:
            times.append(asyncio.get_running_loop().time())

    scene.algorithm = replace(algorithm, train=train)
    scene.between = between
    scene.play()
    return times[0] - STOPS


def scene_of(trainer: Callable[[Scene], FakeTraining] = Endless, config: GateConfig = CONFIG, **parts: Any) -> Scene:
    scene = Scene(config, steps=1000)
    for name, part in parts.items():
        setattr(scene, name, part)
    scene.training = trainer(scene)
    return scene


def nothing_is_lost(scene: Scene, version: int) -> None:
    trained = scene.records(Trained)
    assert [each.version for each in trained] == [*range(1, version + 1)]
    assert scene.controller.version == scene.gate.version == scene.training.version == version
    assert not scene.gate.counts[Stage.TRAINING]
    names = [(group, member) for each in trained for group, members in each.cuts for member in members]
    assert len(names) == len(set(names)) == scene.training.samples_trained


@pytest.mark.parametrize("policy", ["mask", "drop", "block"])
def test_a_step_that_does_not_end_is_undone_and_its_samples_wait(policy: str) -> None:
    scene = scene_of(config=replace(CONFIG, policy=policy))
    assert ended(scene) == GRACE
    nothing_is_lost(scene, 2)
    (lost,) = scene.told(StepLost)
    for row in lost.cuts.batch:
        assert row.member in scene.gate.members(row.group, Stage.READY)


def test_a_step_that_ends_in_time_is_trained() -> None:
    scene = scene_of()

    def end_later(scene: Scene) -> None:
        assert isinstance(scene.training, Endless)
        asyncio.get_running_loop().call_later(3.0, scene.training.ends.set)

    assert ended(scene, end_later) == 3.0
    nothing_is_lost(scene, 3)


def test_the_first_step_of_all_is_undone_too() -> None:
    scene = scene_of(lambda scene: Endless(scene, 0))
    ended(scene)
    nothing_is_lost(scene, 0)


def test_a_run_that_waits_for_samples_ends_at_once() -> None:
    scene = scene_of()

    async def spend(seconds: float) -> None:
        await asyncio.Event().wait()

    scene.reward.spend = spend  # type: ignore[method-assign]
    assert ended(scene) == 0.0
    nothing_is_lost(scene, 0)


class Committed(Endless):
    """Has begun to change the weights when it is asked to undo its step, and takes some time more."""

    asked = 0

    async def undo_step(self, incarnation: int, version: int) -> list[str]:
        self.asked += 1
        if self.version == version:
            asyncio.get_running_loop().call_later(4.0, self.ends.set)
            return ["running"]
        return ["ended"]


def test_a_step_that_has_begun_to_change_the_weights_is_finished() -> None:
    scene = scene_of(Committed)
    assert GRACE + 4.0 <= ended(scene) <= GRACE + 5.0
    nothing_is_lost(scene, 3)


@pytest.mark.parametrize("answers", [["running", "undone"], ["undone", "running", "running"]])
def test_one_rank_that_takes_no_update_is_enough(answers: list[str]) -> None:
    class Ranks(Endless):
        async def undo_step(self, incarnation: int, version: int) -> list[str]:
            await super().undo_step(incarnation, version)
            return answers

    scene = scene_of(Ranks)
    assert ended(scene) == GRACE
    nothing_is_lost(scene, 2)


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_algorithm_that_waits_behind_its_step_loses_no_version(where: str) -> None:
    async def train(fleet: Fleet, control: Controller) -> None:
        async for iteration in control.iterations():
            with iteration as cuts:
                report = await fleet.training.step(cuts)
                if report.version == 3 and where == "before":
                    await asyncio.Event().wait()
                control.trained(report)
            if report.version == 3:
                await asyncio.Event().wait()

    scene = scene_of(lambda scene: Remembering(scene, 1000), algorithm=Algorithm(grpo.ALGORITHM.roll_out, train, "own"))
    assert ended(scene) == GRACE
    nothing_is_lost(scene, 3)


class Remembering(Endless):
    """Answers a repeated step with the report that it has made, as a trainer in a worker does."""

    made: StepReport | None = None

    async def step(self, cuts: Cuts) -> StepReport:
        if self.made is None or cuts.version == self.version:
            self.made = await super().step(cuts)
        return self.made


def test_a_critic_that_learns_for_an_hour_holds_up_nothing() -> None:
    class Asked(FakeCritic):
        was_asked = False

        async def undo_update(self) -> None:
            self.was_asked = True

    scene = scene_of(algorithm=ppo.ALGORITHM, estimate=plain_rewards)
    scene.config = settings(1000, algorithm={"preset": "ppo"})
    scene.critic = critic = Asked(0.1, 3600.0, [scene.generation])
    scene.training = Remembering(scene, 1000)
    assert ended(scene) == GRACE
    assert critic.was_asked
    nothing_is_lost(scene, 1)


def test_samples_of_an_update_that_was_not_taken_wait_for_the_next_start() -> None:
    class Partial(Committed):
        """Takes the first of several updates, and no other."""

        def _compute_loss(self, *given: Any) -> Any:
            samples, in_loss = super()._compute_loss(*given)
            if self.version < 2:
                return samples, in_loss
            cut = [TrainedSample(*each.name, 0, each.trained, CUT_SHORT) for each in samples[1:]]
            return (samples[0], *cut), in_loss

    scene = scene_of(Partial)
    ended(scene)
    nothing_is_lost(scene, 3)
    assert sum(len(members) for _, members in scene.records(Trained)[-1].cuts) == 1
    assert scene.gate.counts[Stage.READY] >= 1
    assert not scene.gate.counts[Stage.DROPPED]


def test_a_trainer_that_cannot_be_asked_ends_the_run_with_its_error() -> None:
    class Deaf(Endless):
        async def undo_step(self, incarnation: int, version: int) -> list[str]:
            raise FleetFailed("the trainer is gone")

    with pytest.raises(FleetFailed, match="the trainer is gone"):
        ended(scene_of(Deaf))
