"""Steps that train nothing, one after the other, end the run: it would go on for ever."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.controller.observers.events import SamplesDropped
from asyncrl.errors import NonFiniteLoss, OnlyTruncated
from asyncrl.protocols.batch import Cuts
from asyncrl.protocols.messages import StepReport
from asyncrl.simulation.fakes.training import FakeTraining, StepCost

sys.path.insert(0, str(Path(__file__).parents[2]))
from scene import Scene


@pytest.mark.trap("not_finite")
def test_three_steps_that_are_not_finite_end_the_run_and_name_the_samples() -> None:
    scene = Scene()
    scene.training.cost = StepCost(1.0, not_finite=1.0)
    with pytest.raises(NonFiniteLoss, match=r"3 steps in a row from version 0 .*\(0, 0\), \(0, 1\)"):
        scene.play()
    assert scene.gate.version == 0
    assert {event.reason for event in scene.told(SamplesDropped)} == {"not finite"}


class NoEnds(FakeTraining):
    async def step(self, cuts: Cuts) -> StepReport:
        return replace(await super().step(cuts), skipped="truncated")


@pytest.mark.trap("truncated")
def test_three_steps_of_answers_without_an_end_end_the_run_and_name_the_key() -> None:
    scene = Scene()
    scene.training = NoEnds(StepCost(1, not_finite=1), 1, [scene.generation], seed=0)
    with pytest.raises(OnlyTruncated, match=r"3 steps in a row from version 0 .*generation\.max_new_tokens"):
        scene.play()
    assert {event.reason for event in scene.told(SamplesDropped)} == {"truncated"}
