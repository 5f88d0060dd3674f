"""Mistakes in the accounts of what trained that both simulations have to find."""

from collections.abc import Iterable
from typing import Any

import pytest

from asyncrl.controller.iterations import Iterations
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.protocols.batch import Cuts
from asyncrl.protocols.hash_chain import chain
from asyncrl.protocols.messages import StepReport, TrainedSample
from asyncrl.simulation.fakes.training import FakeTraining


def a_drop_is_not_journaled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SampleTracker, "_dropped", lambda tracker, state, members, reason: tracker._free(state, members))


def trained_is_told_before_it_is_written_down(patch: pytest.MonkeyPatch) -> None:
    """At every second version the record is not written at all."""
    whole = SampleTracker.trained

    def trained(tracker: SampleTracker, cuts: Any, version: int, advantages: Any, chain: str) -> None:
        if version % 2:
            whole(tracker, cuts, version, advantages, chain)
        else:
            tracker.gate.trained(cuts, version)

    patch.setattr(SampleTracker, "trained", trained)


def all_that_was_sent_counts_as_trained(patch: pytest.MonkeyPatch) -> None:
    """The journal does not look at the trainer's account of each sample."""

    def settle(iterations: Iterations, cuts: Cuts, report: StepReport) -> None:
        if report.skipped:
            iterations._drop(iterations._picked, report.skipped)
        else:
            advantages = tuple(row.advantage or 0.0 for row in cuts.batch)
            iterations.tracker.trained(iterations._picked, report.version, advantages, report.chain)

    patch.setattr(Iterations, "_settle", settle)


def the_chain_holds_all_that_was_given(patch: pytest.MonkeyPatch) -> None:
    """The trainer's chain is over the rows of its batch, not over those in the loss."""

    def next_link(trainer: FakeTraining, samples: Iterable[TrainedSample]) -> bytes:
        return chain(trainer.chain, [sample.name for sample in samples])

    patch.setattr(FakeTraining, "next_link", next_link)


def neither_looks_at_the_loss(patch: pytest.MonkeyPatch) -> None:
    """Journal and chain agree on what was sent, whatever entered the loss."""
    all_that_was_sent_counts_as_trained(patch)
    the_chain_holds_all_that_was_given(patch)
