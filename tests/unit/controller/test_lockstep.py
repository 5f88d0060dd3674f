"""In lockstep each batch is sampled by one version and trained by the next, however fast either side is."""

import asyncio
from collections import defaultdict
from dataclasses import replace

import pytest

from asyncrl.controller.journal.journal import Scan
from asyncrl.controller.journal.ledger import Trained
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import Score
from asyncrl.simulation.fakes.generation import FakeGeneration
from asyncrl.simulation.fakes.scoring import FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests.unit.scene import CONFIG, Scene, settings

LOCKSTEP = replace(CONFIG, admission="lockstep", cut_at=None)
STEPS = 6


class PatientTraining(FakeTraining):
    """Ends no step before it is allowed."""

    def __init__(self, step: float, generation: FakeGeneration) -> None:
        super().__init__(StepCost(step), 1, [generation], seed=0)
        self._allowed: dict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def allow_update(self, incarnation: int, version: int) -> None:
        self._allowed[version].set()

    async def spend(self, seconds: float) -> None:
        await super().spend(seconds)
        async with asyncio.timeout(10_000):
            await self._allowed[self.version].wait()


def played(step: float, token: float, reward: FakeReward | None = None) -> Scene:
    """Plays a run. step: seconds of a step; token: of a decode step."""
    scene = Scene(LOCKSTEP, STEPS)
    scene.config = settings(STEPS, staleness={"limit": 1, "admission": "lockstep"})
    scene.generation = FakeGeneration(LOCKSTEP.slots, token, lambda chance: chance.randint(1, 20))
    scene.training = PatientTraining(step, scene.generation)
    scene.reward = reward or scene.reward
    scene.play()
    return scene


@pytest.mark.parametrize(("step", "token"), [(0.01, 1.0), (100.0, 0.01)])
def test_each_batch_is_of_one_version_and_trained_by_the_next(step: float, token: float) -> None:
    scene = played(step, token)
    trained = [record.record for record in Scan(scene.store) if isinstance(record.record, Trained)]
    assert [[group for group, _ in each.cuts] for each in trained] == [[2 * n, 2 * n + 1] for n in range(STEPS)]
    for group in range(2 * STEPS):
        for member in range(4):
            stamps, version = scene.training.trained[group, member]
            assert set(stamps.tolist()) == {max(0, version - 1)}


class ForgetfulReward(FakeReward):
    """Has no score for the samples of some groups."""

    async def score(self, samples: BatchRef, row: object) -> list[Score]:
        scores = await super().score(samples, row)  # type: ignore[arg-type]
        return [
            Score(None, {}, "none") if sample.group % 3 == 1 else score
            for sample, score in zip(samples, scores, strict=True)
        ]


def test_groups_in_the_place_of_dropped_ones_are_waited_for_too() -> None:
    scene = played(0.01, 1.0, ForgetfulReward(0.1))
    assert scene.training.version == STEPS
    assert all(len(set(stamps.tolist())) == 1 for stamps, _ in scene.training.trained.values())
    assert scene.training.oldest == 1
