"""The trainer is asked to prefetch the next batch, and what trains does not depend on the prefetch."""

import asyncio

import pytest

from asyncrl.algorithms import grpo
from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.controller import Controller
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.journal import Journal, Scan
from asyncrl.controller.journal.ledger import Trained
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.observers.events import Event, Warned
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.errors import DeadlineExceeded, WireError
from asyncrl.fleet.fleet import Fleet
from asyncrl.objectives.advantages import group_baseline
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.simulation import virtual_loop
from asyncrl.simulation.fakes.generation import FakeGeneration, constant
from asyncrl.simulation.fakes.scoring import FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests.unit.scene import settings

CONFIG = GateConfig(groups=2, members=4, limit=2, policy="mask", slots=16, cut_at=2)
STEPS = 6
WARNING = "the trainer could not prefetch rows, and reads them in its steps now: "


class Plain(FakeTraining):
    """Holds no rows. asked: the batches that it was asked to prefetch."""

    def __init__(self, generation: FakeGeneration) -> None:
        super().__init__(StepCost(3.0), CONFIG.limit, [generation], seed=0)
        self.asked: list[BatchRef] = []

    async def prefetch(self, samples: BatchRef) -> list[bool]:
        self.asked.append(samples)
        return [False] * len(samples)


class Broken(Plain):
    """Fails while it prefetches."""

    async def prefetch(self, samples: BatchRef) -> list[bool]:
        await super().prefetch(samples)
        raise WireError("rows larger than what was declared")


class Hanging(Plain):
    """Does not answer a prefetch in time."""

    async def prefetch(self, samples: BatchRef) -> list[bool]:
        await super().prefetch(samples)
        raise DeadlineExceeded("training0.0[0] did not answer prefetch within 60 s")


async def nothing(version: int) -> None:
    return


def play(kind: type[Plain]) -> tuple[Plain, list[Trained], list[Event]]:
    """A run with this trainer: the trainer, what the journal says was trained, all events."""
    store = MemoryStore()
    events = list[Event]()

    async def main() -> Plain:
        generation = FakeGeneration(CONFIG.slots, 0.1, constant(10))
        trainer = kind(generation)
        controller = Controller(
            Gate(CONFIG),
            Journal(store),
            Fleet(generation, FakeReward(0.1), trainer),
            lambda group: (f"prompt {group}", {}),
            settings(STEPS),
            group_baseline,
            between=nothing,
            observe=events.append,
        )
        controller.worker_lives("generation", generation.instance)
        async with asyncio.timeout(10_000):
            await controller.run(grpo.ALGORITHM)
        return trainer

    trainer = virtual_loop.run(main())
    records = [framed.record for framed in Scan(store)]
    return trainer, [record for record in records if isinstance(record, Trained)], events


def test_the_trainer_prefetches_each_batch_but_the_first() -> None:
    trainer, trained, _ = play(Plain)
    groups = [{group for group, _ in record.cuts} for record in trained]
    assert [{row.group for row in asked} for asked in trainer.asked][: STEPS - 1] == groups[1:]
    assert all(row.places for asked in trainer.asked for row in asked)


def warnings_of(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Warned)]


def test_a_prefetch_that_fails_never_ends_the_run() -> None:
    trainer, trained, events = play(Broken)
    assert trained == play(Plain)[1]
    assert len(trainer.asked) == 1
    assert warnings_of(events) == [WARNING + "rows larger than what was declared"]


@pytest.mark.parametrize("error", [ValueError("3 rows for 4 ranks"), KeyError("logprobs"), RuntimeError("?")])
def test_an_error_that_is_not_ours_does_not_end_the_run_either(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raising(Plain):
        async def prefetch(self, samples: BatchRef) -> list[bool]:
            raise error

    _, trained, events = play(Raising)
    assert trained == play(Plain)[1]
    assert warnings_of(events) == [WARNING + str(error)]

    def preview(tracker: SampleTracker) -> list[RowRef]:
        raise error

    monkeypatch.setattr(SampleTracker, "preview", preview)
    _, trained_without, events = play(Plain)
    assert trained_without == trained
    assert warnings_of(events) == [WARNING + str(error)]


def test_a_trainer_that_is_late_or_lost_is_asked_again() -> None:
    trainer, trained, events = play(Hanging)
    assert trained == play(Plain)[1]
    assert len(trainer.asked) in (STEPS - 1, STEPS)
    assert warnings_of(events) == []
