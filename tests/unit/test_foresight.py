"""What the trainer reads ahead changes what is sent to it, and nothing else."""

import asyncio
from dataclasses import replace

import pytest

from asyncrl import virtual
from asyncrl.algorithms import grpo
from asyncrl.controller import Controller, Schedule
from asyncrl.errors import LostRows
from asyncrl.events import Event, StepLost
from asyncrl.fleet import Fleet
from asyncrl.foresight import ForeseeingTraining
from asyncrl.ledger import Journal
from asyncrl.objectives.advantages import GroupBaseline
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef
from asyncrl.protocols.contracts import Training
from asyncrl.protocols.messages import StepReport
from asyncrl.records import Scan, Trained
from asyncrl.rolling import Sampling
from asyncrl.simulated import SimulatedGeneration, SimulatedReward, SimulatedTraining, StepCost, constant
from asyncrl.staleness import Gate, GateConfig
from asyncrl.store import MemoryStore

CONFIG = GateConfig(groups=2, members=4, limit=2, policy="mask", slots=16, cut_at=2)
STEPS = 6


class Plain(SimulatedTraining):
    """Reads in its step only. sent: whether each step's samples came with their places; told: batches foreseen."""

    def __init__(self, generation: SimulatedGeneration) -> None:
        super().__init__(StepCost(3.0), CONFIG.limit, [generation], seed=0)
        self.sent: list[bool] = []
        self.told: list[BatchRef] = []

    async def step(self, cuts: Cuts) -> StepReport:
        self.sent.append(all(row.places for row in cuts.batch))
        return await super().step(cuts)


class Ahead(Plain):
    """Has what it was told of last."""

    async def foresee(self, samples: BatchRef) -> list[bool]:
        self.told.append(samples)
        return [True] * len(samples)

    async def step(self, cuts: Cuts) -> StepReport:
        self.sent.append(all(row.places for row in cuts.batch))
        return await SimulatedTraining.step(self, replace(cuts, batch=BatchRef(tuple(map(self._known, cuts.batch)))))

    def _known(self, row: RowRef) -> RowRef:
        (held,) = [row, *(known for known in self.told[-1] if known.name == row.name)][-1:] if self.told else [row]
        return row if row.places else row.lying_at(held.places)


class Forgetful(Ahead):
    """Said that it has rows, and has them no more."""

    def _known(self, row: RowRef) -> RowRef:
        if not row.places:
            raise LostRows(f"{row.key} was not read ahead")
        return row


class Partly(Ahead):
    """Could not read one row."""

    async def foresee(self, samples: BatchRef) -> list[bool]:
        await super().foresee(samples)
        return [row.member > 0 for row in samples]


def play(kind: type[Plain]) -> tuple[Plain, list[Trained], list[Event]]:
    """A run with this trainer: the trainer, what the journal says was trained, all events."""
    store, events = MemoryStore(), list[Event]()

    async def main() -> Plain:
        generation = SimulatedGeneration(CONFIG.slots, 0.1, constant(10))
        trainer = kind(generation)
        controller = Controller(
            Gate(CONFIG),
            Journal(store),
            Fleet(generation, SimulatedReward(0.1), trainer),
            lambda group: (f"prompt {group}", {}),
            Sampling(1.0, 20, 600.0, seed=0, epoch=0),
            GroupBaseline(),
            Schedule(STEPS),
            observe=events.append,
        )
        controller.worker_lives("generation", generation.instance)
        async with asyncio.timeout(10_000):
            await controller.run(grpo.PAGE)
        return trainer

    trainer = virtual.run(main())
    records = [framed.record for framed in Scan(store.read, store.size)]
    return trainer, [record for record in records if isinstance(record, Trained)], events


def test_a_batch_that_the_trainer_has_is_named_without_its_places() -> None:
    trainer, trained, _ = play(Ahead)
    assert trainer.sent == [True] + [False] * (STEPS - 1)
    groups = [{group for group, _ in record.cuts} for record in trained]
    assert [{row.group for row in told} for told in trainer.told][: STEPS - 1] == groups[1:]
    assert all(row.places for told in trainer.told for row in told)


@pytest.mark.parametrize("kind", [Ahead, Forgetful, Partly])
def test_what_trains_is_what_would_have_trained_anyhow(kind: type[Plain]) -> None:
    assert play(kind)[1] == play(Plain)[1]


@pytest.mark.parametrize("kind", [Plain, Partly])
def test_a_trainer_without_all_rows_is_told_where_they_lie(kind: type[Plain]) -> None:
    assert play(kind)[0].sent == [True] * STEPS


def test_a_trainer_that_has_forgotten_is_asked_once_more_and_nothing_is_lost() -> None:
    trainer, _, events = play(Forgetful)
    assert trainer.sent == [True] + [False, True] * (STEPS - 1)
    assert not [event for event in events if isinstance(event, StepLost)]


def test_a_page_may_ask_for_whatever_a_trainer_answers() -> None:
    assert Training.endpoints.keys() <= vars(ForeseeingTraining).keys()
