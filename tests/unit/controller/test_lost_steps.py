"""Steps that fail: whose groups begin again, what ends the run, and whom it names."""

import pytest

from asyncrl.algorithms import grpo
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.iterations import MOST_LOST_STEPS
from asyncrl.controller.journal import ledger
from asyncrl.controller.weight_publisher import WeightPublisher
from asyncrl.errors import ALL_SLOTS, AsyncrlError, DeadlineExceeded, FleetFailed, LostRows, PeerLost, WeightsError
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import Cuts
from asyncrl.protocols.messages import StepReport
from asyncrl.simulation.fakes.generation import FakeGeneration
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests import golden
from tests.unit.scene import Scene


class FailingTraining(FakeTraining):
    """Raises `error` in the second step."""

    def __init__(self, generation: FakeGeneration, error: BaseException) -> None:
        super().__init__(StepCost(1.0), 1, [generation], seed=0)
        self._error = error

    async def step(self, cuts: Cuts) -> StepReport:
        if self.version == 1 and (error := self._error):
            self._error = None
            raise error
        return await super().step(cuts)


def scene_with(error: BaseException) -> Scene:
    scene = Scene()
    scene.training = FailingTraining(scene.generation, error)
    return scene


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (PeerLost("training0.0 died"), FleetFailed),
        (DeadlineExceeded("training0.0 did not answer step within 600 s"), FleetFailed),
        (WeightsError("slot 0 does not match its digest"), WeightsError),
    ],
)
def test_a_lost_trainer_ends_the_run_with_the_code_to_resume_and_another_error_as_itself(
    error: AsyncrlError, ended: type[AsyncrlError]
) -> None:
    with golden.raises(ended, match=str(error)) as caught:
        scene_with(error).play()
    assert (caught.value.exit_code == 75) == (ended is FleetFailed)


def test_lost_rows_send_their_groups_back() -> None:
    scene = scene_with(LostRows("slot 3 was freed"))
    scene.play()
    assert scene.gate.version == 3
    assert {attempt.reason for attempt in scene.records(ledger.AttemptStarted)} == {"slot 3 was freed"}


def test_an_owner_that_lives_and_cannot_be_reached_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = list[list[str]]()
    monkeypatch.setattr(WeightPublisher, "unread", lambda self, readers, why: unread.append(list(readers)) or [])
    places = [("tcp://h2:7000#generation1.0-0-a", ALL_SLOTS), ("tcp://h4:7000#generation0.0-0-b", 3)]
    scene = scene_with(LostRows("the owner is gone", places))
    scene.play()
    assert unread == [["generation1.0-0-a"]], "of the other one a row was overwritten"
    assert scene.gate.version == 3


def test_rows_that_are_lost_again_and_again_end_the_run_with_a_clear_word() -> None:
    class Amnesic(FakeTraining):
        steps = 0

        async def step(self, cuts: Cuts) -> StepReport:
            self.steps += 1
            raise LostRows("the owner of inproc://a is gone")

    scene = Scene()
    scene.training = trainer = Amnesic(StepCost(1.0), 1, [scene.generation], seed=0)
    with golden.raises(FleetFailed) as caught:
        scene.play()
    assert trainer.steps == MOST_LOST_STEPS
    assert caught.value.exit_code == 75


def test_an_iteration_blames_the_worker_that_the_error_names() -> None:
    async def train(fleet: Fleet, control: Controller) -> None:
        async for iteration in control.iterations():
            with iteration as cuts:
                raise PeerLost("reward0.0-0-12: it was killed")
            control.trained(await fleet.training.step(cuts))

    scene = Scene()
    scene.algorithm = Algorithm(grpo.roll_out, train)
    with golden.raises(FleetFailed):
        scene.play()
