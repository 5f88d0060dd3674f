"""Each of these mistakes is found by the random schedules: the invariants can fail."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

import asyncrl.controller.gate.gate
from asyncrl.algorithms import grpo
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.gate.admission import Admission
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import SampleState, Stage
from asyncrl.controller.iterations import Iterations
from asyncrl.controller.journal import ledger
from asyncrl.controller.rollouts import Rollouts
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.controller.weight_publisher import WeightPublisher
from asyncrl.errors import AsyncrlError
from tests.simulation.broken_tracker import (
    a_drop_is_not_journaled,
    all_that_was_sent_counts_as_trained,
    neither_looks_at_the_loss,
    the_chain_holds_all_that_was_given,
    trained_is_told_before_it_is_written_down,
)
from tests.simulation.simulated_run import Scenario, simulate

SEEDS = 500
Patch = pytest.MonkeyPatch


def off_by_one_in_the_limit(patch: Patch) -> None:
    patch.setattr(asyncrl.controller.gate.gate, "live", lambda stamps, version, limit: version - stamps <= limit + 1)


def strictly_less_than_the_limit(patch: Patch) -> None:
    """Drops what is exactly as old as allowed: at limit 0, everything."""
    patch.setattr(asyncrl.controller.gate.gate, "live", lambda stamps, version, limit: version - stamps < limit)


def one_group_too_many(patch: Patch) -> None:
    def may_draw(gate: Gate) -> bool:
        fits = gate.held() <= gate.config.credits and gate.in_flight <= gate.config.cap * gate.config.members
        return fits and not gate._stopped

    patch.setattr(Gate, "may_draw", may_draw)


def block_looks_at_the_present_only(patch: Patch) -> None:
    patch.setattr(Gate, "fits_deadlines", lambda gate: True)


def answers_of_an_overtaken_attempt_are_accepted(patch: Patch) -> None:
    """The gate's fence is the second one: it is needed when the attempt is not ended first."""

    def lost(rolling: Rollouts, group: int, reason: str) -> None:
        if rolling._open(group):
            rolling.tracker.restart(group, reason)
        if group not in rolling.running and rolling._gate.members(group, Stage.RUNNING):
            rolling.start(group)

    def current(gate: Gate, group: int, member: int, attempt: int, stage: Stage) -> SampleState | None:
        sample = gate._groups[group].samples[member] if group in gate._groups else None
        return sample if sample is not None and sample.stage is stage else None

    patch.setattr(Rollouts, "lost", lost)
    patch.setattr(Gate, "_current", current)


def rows_are_never_released(patch: Patch) -> None:
    patch.setattr(SampleTracker, "_free", lambda tracker, state, members, attempt=None: None)


def rows_of_a_failed_attempt_are_not_released(patch: Patch) -> None:
    def restart(tracker: SampleTracker, group: int, reason: str) -> None:
        members = tracker.gate.members(group, Stage.RUNNING, Stage.SCORING, Stage.READY)
        tracker.journal.append(ledger.AttemptStarted(group, tracker.gate.restart(group, members), members, reason))
        tracker.changed()

    patch.setattr(SampleTracker, "restart", restart)


def a_step_runs_twice(patch: Patch) -> None:
    async def train(fleet: Any, gate: Controller) -> None:
        async for iteration in gate.iterations():
            with iteration as cuts:
                await fleet.training.step(cuts)
                gate.trained(await fleet.training.step(cuts))

    patch.setattr(grpo, "ALGORITHM", Algorithm(grpo.roll_out, train))


def a_lost_step_counts_as_trained(patch: Patch) -> None:
    patch.setattr(Iterations, "lost", lambda iterations, error: iterations._end())


def lost_rows_are_not_made_again(patch: Patch) -> None:
    patch.setattr(Rollouts, "rows_lost", lambda rollouts, cuts, error: None)


def a_skipped_step_raises_the_version(patch: Patch) -> None:
    def drop(iterations: Iterations, picked: Any, reason: str) -> None:
        iterations._gate.trained(picked, iterations._gate.version + 1)

    patch.setattr(Iterations, "_drop", drop)


def batches_in_order_of_arrival(patch: Patch) -> None:
    whole = SampleTracker.rows

    def rows(tracker: SampleTracker, group: int, members: Iterable[int]) -> list[Any]:
        return list(reversed(whole(tracker, group, members)))

    patch.setattr(SampleTracker, "rows", rows)


def leases_are_not_relayed(patch: Patch) -> None:
    """The trainer believes that its readers still hold the first version they said they use."""
    whole = WeightPublisher._relay

    async def relay(publisher: WeightPublisher, reader: str, using: Any) -> bool:
        return using.version > 0 or await whole(publisher, reader, using)

    patch.setattr(WeightPublisher, "_relay", relay)


def a_late_joiner_gets_no_weights(patch: Patch) -> None:
    async def worker_started(controller: Controller, service: str) -> None:
        return

    patch.setattr(Controller, "worker_started", worker_started)


def admission_stops_below_a_batch(patch: Patch) -> None:
    patch.setattr(Admission, "allows", lambda admission, waiting: waiting < admission._config.batch // 2)


def a_change_wakes_nobody(patch: Patch) -> None:
    patch.setattr(Controller, "_state_changed", lambda controller: controller._drawable.set())


MUTANTS: Mapping[Callable[[Patch], None], int] = {
    off_by_one_in_the_limit: 3,
    strictly_less_than_the_limit: 1,
    one_group_too_many: 0,
    block_looks_at_the_present_only: 9,
    answers_of_an_overtaken_attempt_are_accepted: 12,
    rows_are_never_released: 4,
    rows_of_a_failed_attempt_are_not_released: 29,
    a_drop_is_not_journaled: 1,
    trained_is_told_before_it_is_written_down: 2,
    all_that_was_sent_counts_as_trained: 0,
    the_chain_holds_all_that_was_given: 0,
    neither_looks_at_the_loss: 15,
    a_step_runs_twice: 2,
    a_lost_step_counts_as_trained: 8,
    lost_rows_are_not_made_again: 8,
    a_skipped_step_raises_the_version: 0,
    batches_in_order_of_arrival: 46,
    leases_are_not_relayed: 2,
    a_late_joiner_gets_no_weights: 8,
    admission_stops_below_a_batch: 0,
    a_change_wakes_nobody: 2,
}
"""Each mutant and a seed whose schedule finds it; the seed changes when schedules are drawn in another way."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(
    mutant: Callable[[Patch], None], monkeypatch: Patch, random_scenario: Callable[[int], Scenario]
) -> None:
    mutant(monkeypatch)
    seeds = (MUTANTS[mutant], *range(SEEDS))
    assert any(_fails(random_scenario(seed)) for seed in seeds), "no invariant noticed"


def _fails(scenario: Scenario) -> bool:
    try:
        return simulate(scenario).version < scenario.steps
    except (AssertionError, AsyncrlError, TimeoutError, ExceptionGroup) as error:
        print(f"seed {scenario.seed}: {error!r}")  # noqa: T201
        return True
