"""What engines make of new weights, on its way from the reader that took them over to the user."""

from dataclasses import replace

import pytest

from asyncrl.controller.observers.events import StepDone, Warned
from asyncrl.protocols.messages import Published, Using
from asyncrl.simulation.fakes.generation import FakeGeneration, constant
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests.unit.scene import CONFIG, Scene, settings


class OffKey(FakeGeneration):
    """Says that it is further from the trainer with each version."""

    async def use_weights(self, published: Published) -> Using:
        return replace(await super().use_weights(published), canary=0.5 * published.version)


@pytest.mark.trap("engines_disagree")
def test_it_is_in_the_metrics_of_the_next_step_and_is_warned_of() -> None:
    scene = Scene()
    scene.generation = OffKey(CONFIG.slots, 0.1, constant(20))
    scene.training = FakeTraining(StepCost(1.0), CONFIG.limit, [scene.generation], seed=0)
    scene.config = settings(4, mismatch={"warn_canary": 0.6})
    scene.play()
    heard = [event.report.metrics.get("mismatch/canary") for event in scene.told(StepDone)]
    assert heard == [0.0, 0.5, 1.0, 1.5]
    (apart,) = scene.told(Warned)
    assert apart.text.startswith("step 3: mismatch/canary is 1, over mismatch.warn_canary = 0.6; engine and trainer")
