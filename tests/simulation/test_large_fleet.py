"""A thousand workers with a hundred thousand samples in flight cost the controller about as much a sample as eight
workers with two thousand samples do; on virtual time, over the in-process wire."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from asyncrl.controller.gate.group_state import Stage
from asyncrl.controller.journal.audit import Audit
from asyncrl.controller.observers.events import Event, StepDone
from asyncrl.simulation.large_fleet import LargeFleet, LargeRun, WatchedLoop, run_large_fleet
from tests.instruction_count import counting

COUNTED_FROM = 3
"""Step after which instructions are counted: by then every sample of the first draw is scored, so that in each further
step a batch is drawn, sampled, scored and trained."""
SMALL = LargeFleet(
    groups=64,
    members=16,
    limit=1,
    steps=4,
    step_time=5.0,
    generators=8,
    scorers=4,
    checkpoint_every=99,
    admission="full",
)
LARGE = replace(SMALL, limit=98, generators=699, scorers=300)
GROWTH = 4.0
"""Each step hands weights to each generator, and here 699 of them share a step of 1,024 samples. Work that grew with
workers or samples for each sample would be fifty to a hundred times as much."""


@dataclass
class Measured:
    """instructions: of the controller in the counted steps. samples: trained in them."""

    instructions: int = 0
    samples: int = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            loop = asyncio.get_running_loop()
            assert isinstance(loop, WatchedLoop)
            if loop.controller_scope is not None:
                self.samples += len(event.cuts.batch)
            if event.report.version == COUNTED_FROM:
                loop.controller_scope = self._count

    def _count(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        with counting() as count:
            callback(*args)
        self.instructions += count.instructions

    @property
    def a_sample(self) -> float:
        return self.instructions / self.samples


def measured_run(shape: LargeFleet) -> tuple[LargeRun, Measured]:
    measured = Measured()
    return run_large_fleet(shape, measured.observe), measured


@pytest.mark.timeout(600)
def test_work_for_a_sample_does_not_grow_with_the_fleet() -> None:
    (small, of_small), (large, of_large) = measured_run(SMALL), measured_run(LARGE)
    for run, shape in ((small, SMALL), (large, LARGE)):
        counts = run.gate.counts
        batch = shape.gate.batch
        assert run.most_in_flight == shape.gate.credits
        assert counts[Stage.TRAINED] == run.journal.ledger.trained == shape.steps * batch
        assert not run.journal.ledger.dropped, "nothing is lost, and nothing too old"
        assert run.journal.ledger.drawn == run.gate.in_flight + shape.steps * batch
        assert (audit := Audit(run.store)).ok, str(audit)
        assert not run.fleet.workers["reward"].holders, "reward workers hold no rows"
        assert len(run.fleet.workers["generation"].holders) <= len(run.gate.groups()) + shape.groups
    assert sum(1 for workers in large.fleet.workers.values() for _ in workers) == 1000
    assert large.most_in_flight >= 100_000
    assert of_large.a_sample <= GROWTH * of_small.a_sample
