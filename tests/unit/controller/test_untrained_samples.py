"""The journal says `trained` of what entered the loss by the trainer's account, and `dropped` of the rest of a step."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest

from asyncrl.controller.iterations import Iterations
from asyncrl.controller.journal.audit import Audit
from asyncrl.controller.journal.ledger import Dropped, Trained
from asyncrl.controller.observers.events import StepBegan
from asyncrl.errors import JournalError, PolicyMismatch, Refused
from asyncrl.protocols.batch import Batch, BatchRef, Cuts
from asyncrl.protocols.messages import LEFT_OUT, PromptGroup, StepReport, TrainedSample
from asyncrl.simulation.fakes.generation import FakeGeneration, constant
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests.unit.scene import CONFIG, Scene, settings


class LosesARow(FakeTraining):
    """Loses the second row of every batch between packing and loss."""

    def _compute_loss(self, batch: BatchRef, rows: Batch) -> tuple[tuple[TrainedSample, ...], list[Any]]:
        samples, in_loss = super()._compute_loss(batch, rows)
        lost = replace(samples[1], trained=0, masked=samples[1].trained, reason=LEFT_OUT)
        return (samples[0], lost, *samples[2:]), in_loss


def scene_with(kind: type[FakeTraining] = FakeTraining, cost: StepCost | None = None) -> Scene:
    scene = Scene(steps=3)
    scene.training = kind(cost or StepCost(1.0), 1, [scene.generation], seed=0)
    return scene


def test_the_audit_sees_a_row_that_was_lost_between_packing_and_loss() -> None:
    scene = scene_with(LosesARow)
    scene.play()
    audit = Audit(scene.store)
    assert audit.ok, str(audit)
    assert audit.ledger.dropped == {LEFT_OUT: 3}
    assert audit.ledger.trained == scene.training.samples_trained == 3 * 7
    trained = scene.records(Trained)
    assert [type(record) for record in scene.records(Trained | Dropped)] == [Dropped, Trained] * 3, (
        "the version rises last"
    )
    assert {(g, m) for each in trained for g, members in each.cuts for m in members} == scene.training.trained.keys()
    assert all(len(each.advantages) == sum(len(members) for _, members in each.cuts) for each in trained)


def test_a_journal_that_says_trained_of_every_row_it_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(iterations: Iterations, cuts: Cuts, report: StepReport) -> None:
        advantages = tuple(row.advantage or 0.0 for row in cuts.batch)
        iterations.tracker.trained(iterations._picked, report.version, advantages, report.chain)

    monkeypatch.setattr(Iterations, "_settle", settle)
    with pytest.raises(JournalError, match="did not train what the journal says for version 1"):
        scene_with(LosesARow).play()


def test_a_sample_that_the_account_does_not_name_has_not_trained() -> None:
    class Forgets(LosesARow):
        async def step(self, cuts: Cuts) -> StepReport:
            report = await super().step(cuts)
            return replace(report, samples=tuple(sample for sample in report.samples if sample.trained))

    scene = scene_with(Forgets)
    scene.play()
    assert Audit(scene.store).ledger.dropped == {LEFT_OUT: 3}


@pytest.mark.parametrize(
    "change", [{"skipped": "stale"}, {"samples": ()}], ids=["skipped, with trained samples", "trained, without samples"]
)
def test_an_account_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    class Contradicts(FakeTraining):
        async def step(self, cuts: Cuts) -> StepReport:
            report = replace(await super().step(cuts), **change)
            return replace(report, version=0) if report.skipped else report

    with pytest.raises(Refused, match="the trainer reports 1 updates, skipped as"):
        scene_with(Contradicts).play()


def test_three_steps_that_reject_every_sample_end_the_run() -> None:
    with pytest.raises(PolicyMismatch, match=r"3 steps in a row from version 0 trained nothing.*rejection_high"):
        scene_with(cost=StepCost(1.0, rejected=1.0)).play()


class Finishing(FakeGeneration):
    """Ends every answer for this reason."""

    reason = ""

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        async with aclosing(cast(Any, super().generate(prompts))) as items:
            async for samples in items:
                yield BatchRef(tuple(row._replace(finish=self.reason) for row in samples))


@pytest.mark.parametrize(("finish", "counts"), [("stop", True), ("stop_string", True), ("length", False)])
def test_only_an_answer_that_met_its_token_limit_leaves_the_denominators(finish: str, counts: bool) -> None:
    scene = scene_with()
    scene.config = settings(3, algorithm={"mask_truncated": True})
    scene.generation = Finishing(CONFIG.slots, 0.1, constant(20))
    scene.generation.reason = finish
    scene.training.read_from([scene.generation])
    scene.play()
    assert {event.cuts.samples for event in scene.told(StepBegan)} == {8 if counts else 0}
