"""The trainer is asked to prefetch the next batch, and what trains does not depend on the prefetch."""

from functools import cache

import pytest

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.journal.ledger import Trained
from asyncrl.controller.observers.events import Warned
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.errors import DeadlineExceeded, WireError
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.simulation.fakes.generation import FakeGeneration, constant
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests.unit.scene import Scene

CONFIG = GateConfig(groups=2, members=4, limit=2, policy="mask", slots=16, cut_at=2)
STEPS = 6
WARNING = "the trainer could not prefetch rows, and reads them in its steps now: "


class Plain(FakeTraining):
    """Holds no rows. asked: the batches that it was asked to prefetch. error: of each."""

    error: Exception | None = None

    def __init__(self, generation: FakeGeneration) -> None:
        super().__init__(StepCost(3.0), CONFIG.limit, [generation], seed=0)
        self.asked: list[BatchRef] = []

    async def prefetch(self, samples: BatchRef) -> list[bool]:
        self.asked.append(samples)
        if self.error is not None:
            raise self.error
        return [False] * len(samples)


def play(error: Exception | None = None) -> tuple[Plain, list[Trained], list[str]]:
    """A run whose prefetches fail: the trainer, what the journal says was trained, all warnings."""
    scene = Scene(CONFIG, STEPS)
    scene.generation = FakeGeneration(CONFIG.slots, 0.1, constant(10))
    scene.training = trainer = Plain(scene.generation)
    trainer.error = error
    scene.play()
    return trainer, scene.records(Trained), [event.text for event in scene.told(Warned)]


@cache
def trained_plainly() -> list[Trained]:
    return play()[1]


def test_the_trainer_prefetches_each_batch_but_the_first() -> None:
    trainer, trained, _ = play()
    groups = [{group for group, _ in record.cuts} for record in trained]
    assert [{row.group for row in asked} for asked in trainer.asked][: STEPS - 1] == groups[1:]
    assert all(row.places for asked in trainer.asked for row in asked)


@pytest.mark.parametrize("error", [WireError("rows larger than what was declared"), KeyError("logprobs")])
def test_a_prefetch_that_fails_never_ends_the_run(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, trained, warnings = play(error)
    assert trained == trained_plainly()
    assert len(trainer.asked) == 1
    assert warnings == [WARNING + str(error)]

    def preview(tracker: SampleTracker) -> list[RowRef]:
        raise error

    monkeypatch.setattr(SampleTracker, "preview", preview)
    assert play()[1:] == (trained, [WARNING + str(error)])


def test_a_trainer_that_is_late_or_lost_is_asked_again() -> None:
    trainer, trained, warnings = play(DeadlineExceeded("training0.0[0] did not answer prefetch within 60 s"))
    assert trained == trained_plainly()
    assert len(trainer.asked) in (STEPS - 1, STEPS)
    assert warnings == []
