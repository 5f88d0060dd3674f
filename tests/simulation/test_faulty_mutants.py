"""Trials with faults find each of these mistakes, so their checks can fail."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest

import asyncrl.controller.gate.gate
import asyncrl.controller.journal.journal
import asyncrl.fleet.supervisor
import asyncrl.simulation.fakes.training
from asyncrl.algorithms import grpo
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import SampleState, Stage
from asyncrl.controller.journal import ledger
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.rollouts import Rollouts
from asyncrl.controller.row_releases import RowReleases
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.controller.training_run import WorkerEvents
from asyncrl.controller.weight_publisher import WeightPublisher
from asyncrl.errors import PeerLost
from asyncrl.fleet.fleet import RunningFleet
from asyncrl.fleet.lifecycle_events import WorkerStarted
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.fleet.service_calls import Handle
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.message_codec import MessageSequence, decode
from asyncrl.lanes.control.open_calls import PendingReply, PendingStream
from asyncrl.simulation.fakes.training import FakeTraining
from asyncrl.simulation.faults.simulate_command import described, outcome_of
from asyncrl.simulation.faults.trial_execution import TrialRun
from asyncrl.simulation.faults.trial_plan import draw_trial
from tests.simulation.broken_tracker import (
    a_drop_is_not_journaled,
    all_that_was_sent_counts_as_trained,
    neither_looks_at_the_loss,
    the_chain_holds_all_that_was_given,
    trained_is_told_before_it_is_written_down,
)

SEEDS = 500
Patch = pytest.MonkeyPatch


# ---- links -----------------------------------------------------------------------------------------------


def a_gap_in_the_numbers_is_ignored(patch: Patch) -> None:
    patch.setattr(
        MessageSequence, "accept", lambda line, frames, *limits: decode([frames[0][8:], *frames[1:]], *limits)
    )


def heartbeats_never_fire(patch: Patch) -> None:
    async def beat(link: Client, seconds: float) -> None:
        return

    patch.setattr(Client, "_send_heartbeats", beat)


def deadlines_are_not_enforced(patch: Patch) -> None:
    patch.setattr(Client, "_within", lambda link, seconds, method, number: nullcontext())


def a_broken_link_fails_no_call(patch: Patch) -> None:
    """A call on a broken link waits for its answer on and on."""

    def fail(link: Client, reason: str) -> None:
        if not link.lost.is_set():
            link.reason = reason
            link.lost.set()

    patch.setattr(Client, "fail", fail)


def a_late_answer_is_given_to_another_call(patch: Patch) -> None:
    def answer(link: Client, number: int) -> PendingReply | PendingStream | None:
        return link._pending.get(number) or next(iter(link._pending.values()), None)

    patch.setattr(Client, "_find_pending", answer)


def a_call_that_may_not_be_repeated_is(patch: Patch) -> None:
    async def call(handle: Handle, spec: Any, args: tuple[Any, ...]) -> Any:
        seconds = handle._deadline(args)
        try:
            return await handle._try_call(spec, args, seconds)
        except PeerLost:
            return await handle._try_call(spec, args, seconds)

    patch.setattr(Handle, "_call", call)


# ---- workers ---------------------------------------------------------------------------------------------


def a_restarted_worker_has_the_name_of_the_dead_one(patch: Patch) -> None:
    whole = RunningFleet._next_instance
    first: dict[RemoteWorker, WorkerSpec] = {}

    def next_instance(fleet: RunningFleet, spec: Any, worker: RemoteWorker) -> WorkerSpec:
        if worker not in first:
            first[worker] = whole(fleet, spec, worker)
        return first[worker]

    patch.setattr(RunningFleet, "_next_instance", next_instance)


def a_dead_reader_keeps_its_lease(patch: Patch) -> None:
    async def follow(news: WorkerEvents) -> None:
        while True:
            if isinstance(event := await news._queue.get(), WorkerStarted):
                await news.controller.worker_started(event.service)

    patch.setattr(WorkerEvents, "follow", follow)


def readers_are_not_attached_before_they_are_told(patch: Patch) -> None:
    async def attach(publisher: WeightPublisher, reader: str, published: Any) -> bool:
        return True

    patch.setattr(WeightPublisher, "_attach", attach)


def a_reader_that_holds_on_is_not_evicted(patch: Patch) -> None:
    patch.setattr(WeightPublisher, "_overdue", lambda publisher, reader: None)


# ---- rows ------------------------------------------------------------------------------------------------


def rows_are_never_released(patch: Patch) -> None:
    patch.setattr(RowReleases, "release", lambda notices, samples: None)


def answers_of_an_overtaken_attempt_are_accepted(patch: Patch) -> None:
    def current(gate: Gate, group: int, member: int, attempt: int, stage: Stage) -> SampleState | None:
        sample = gate._groups[group].samples[member] if group in gate._groups else None
        return sample if sample is not None and sample.stage is stage else None

    def lost(rolling: Rollouts, group: int, reason: str) -> None:
        if rolling._open(group):
            rolling.tracker.restart(group, reason)
        rolling._again[group] = None

    patch.setattr(Rollouts, "lost", lost)
    patch.setattr(Gate, "_current", current)


# ---- steps and the journal -------------------------------------------------------------------------------


def off_by_one_in_the_limit(patch: Patch) -> None:
    def live(stamps: Any, version: int, limit: int) -> Any:
        return version - stamps <= limit + 1

    patch.setattr(asyncrl.controller.gate.gate, "live", live)
    patch.setattr(asyncrl.simulation.fakes.training, "live", live)


def a_step_runs_twice(patch: Patch) -> None:
    """The algorithm repeats a step, and the trainer does not look at the version that it starts from."""

    async def train(fleet: Any, gate: Controller) -> None:
        async for iteration in gate.iterations():
            with iteration as cuts:
                report = await fleet.training.step(cuts)
                if not report.skipped:
                    await fleet.training.step(cuts)
                gate.trained(report)

    async def step(trainer: FakeTraining, cuts: Any) -> Any:
        return await trainer.train(cuts, await trainer.read_checked(cuts.batch, ["versions"]))

    patch.setattr(grpo, "ALGORITHM", Algorithm(grpo.roll_out, train))
    patch.setattr(FakeTraining, "step", step)


def a_checkpoint_is_acknowledged_before_the_journal_is_on_disk(patch: Patch) -> None:
    patch.setattr(Journal, "sync", lambda journal: None)


def what_was_resumed_over_still_counts(patch: Patch) -> None:
    patch.setattr(asyncrl.controller.journal.journal, "void_ranges", lambda resumes: [])


def an_attempt_keeps_its_number(patch: Patch) -> None:
    def restart(tracker: SampleTracker, group: int, reason: str) -> None:
        members = tracker.gate.members(group, Stage.RUNNING, Stage.SCORING, Stage.READY)
        number = tracker.gate.restart(group, members) - 1
        tracker.journal.append(ledger.AttemptStarted(group, number, members, reason))
        tracker._free(tracker.gate.group(group), members, number)
        tracker.changed()

    patch.setattr(SampleTracker, "restart", restart)


MUTANTS: Mapping[Callable[[Patch], None], int] = {
    a_gap_in_the_numbers_is_ignored: 23,
    heartbeats_never_fire: 30,
    deadlines_are_not_enforced: 35,
    a_broken_link_fails_no_call: 25,
    a_late_answer_is_given_to_another_call: 1464,
    a_call_that_may_not_be_repeated_is: 9,
    a_restarted_worker_has_the_name_of_the_dead_one: 13,
    a_dead_reader_keeps_its_lease: 6,
    readers_are_not_attached_before_they_are_told: 2855,
    a_reader_that_holds_on_is_not_evicted: 2896,
    rows_are_never_released: 8,
    answers_of_an_overtaken_attempt_are_accepted: 170,
    off_by_one_in_the_limit: 7,
    a_step_runs_twice: 0,
    a_checkpoint_is_acknowledged_before_the_journal_is_on_disk: 238,
    trained_is_told_before_it_is_written_down: 0,
    all_that_was_sent_counts_as_trained: 0,
    the_chain_holds_all_that_was_given: 0,
    neither_looks_at_the_loss: 0,
    what_was_resumed_over_still_counts: 12,
    a_drop_is_not_journaled: 3,
    an_attempt_keeps_its_number: 6,
}
"""Each mutant and a seed whose trial finds it; the seed changes when trials are drawn in another way."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    assert any(_fails(seed) for seed in (MUTANTS[mutant], *range(SEEDS))), "no check noticed"


def _fails(seed: int) -> bool:
    outcome = outcome_of(draw_trial(seed))
    print(f"seed {seed}: {described(outcome):.300}")  # noqa: T201
    return not isinstance(outcome, TrialRun)
