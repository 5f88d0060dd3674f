"""Each of these mistakes is found by the random schedules: the invariants can fail."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import asyncrl.staleness
from asyncrl import records
from asyncrl.algorithms import grpo
from asyncrl.books import Books
from asyncrl.controller import Controller, Page
from asyncrl.errors import AsyncrlError
from asyncrl.groups import Sample, Stage
from asyncrl.iteration import Iterations
from asyncrl.publishing import Publisher
from asyncrl.rolling import Rolling
from asyncrl.simulation import Scenario, simulate
from asyncrl.staleness import Gate

sys.path.insert(0, str(Path(__file__).parent))
from broken_books import a_drop_is_not_journaled, trained_is_told_before_it_is_written_down

SEEDS = 500
Patch = pytest.MonkeyPatch


def off_by_one_in_the_limit(patch: Patch) -> None:
    patch.setattr(asyncrl.staleness, "live", lambda stamps, version, limit: version - stamps <= limit + 1)


def strictly_less_than_the_limit(patch: Patch) -> None:
    """Drops what is exactly as old as allowed: at limit 0, everything."""
    patch.setattr(asyncrl.staleness, "live", lambda stamps, version, limit: version - stamps < limit)


def one_group_too_many(patch: Patch) -> None:
    def may_draw(gate: Gate) -> bool:
        fits = gate.held() <= gate.config.credits and gate.in_flight <= gate.config.cap * gate.config.members
        return fits and not gate._stopped

    patch.setattr(Gate, "may_draw", may_draw)


def block_looks_at_the_present_only(patch: Patch) -> None:
    patch.setattr(Gate, "fits_deadlines", lambda gate, cuts: True)


def answers_of_an_overtaken_attempt_are_accepted(patch: Patch) -> None:
    """The gate's fence is the second one: it is needed when the attempt is not ended first."""

    def lost(rolling: Rolling, group: int, reason: str) -> None:
        rolling._failed(group, reason)
        if group not in rolling._alive and rolling._gate.members(group, Stage.RUNNING):
            rolling.start(group)

    def current(gate: Gate, group: int, member: int, attempt: int, stage: Stage) -> Sample | None:
        sample = gate._groups[group].samples[member] if group in gate._groups else None
        return sample if sample is not None and sample.stage is stage else None

    patch.setattr(Rolling, "lost", lost)
    patch.setattr(Gate, "_current", current)


def rows_are_never_released(patch: Patch) -> None:
    patch.setattr(Books, "_free", lambda books, group, members: None)


def rows_of_a_failed_attempt_are_not_released(patch: Patch) -> None:
    def restart(books: Books, group: int, reason: str, failures: int) -> None:
        members = books.gate.members(group, Stage.RUNNING, Stage.SCORING, Stage.READY)
        books.journal.append(records.Attempt(group, books.gate.restart(group, members), members, reason))
        for member in members:
            books._rows[group].pop(member, None)
        books._changed()

    patch.setattr(Books, "restart", restart)


def a_step_runs_twice(patch: Patch) -> None:
    async def train(fleet: Any, gate: Controller) -> None:
        async for iteration in gate.iterations():
            with iteration as cuts:
                await fleet.training.step(cuts)
                gate.trained(await fleet.training.step(cuts))

    patch.setattr(grpo, "PAGE", Page(grpo.roll_out, train))


def a_lost_step_counts_as_trained(patch: Patch) -> None:
    patch.setattr(Iterations, "lost", lambda iterations, error: iterations._end())


def lost_rows_are_not_made_again(patch: Patch) -> None:
    patch.setattr(Controller, "_rows_lost", lambda controller, cuts, why: None)


def a_skipped_step_raises_the_version(patch: Patch) -> None:
    def drop(iterations: Iterations, picked: Any, reason: str) -> None:
        iterations._gate.trained(picked, iterations._gate.version + 1)

    patch.setattr(Iterations, "_drop", drop)


def batches_in_order_of_arrival(patch: Patch) -> None:
    whole = Books.rows

    def rows(books: Books, group: int, members: Iterable[int]) -> list[Any]:
        return list(reversed(whole(books, group, members)))

    patch.setattr(Books, "rows", rows)


def leases_are_not_relayed(patch: Patch) -> None:
    """The trainer believes that its readers still hold the first version they said they use."""
    whole = Publisher._relay

    async def relay(publisher: Publisher, reader: str, using: Any) -> None:
        if using.version == 0:
            await whole(publisher, reader, using)

    patch.setattr(Publisher, "_relay", relay)


def a_late_joiner_gets_no_weights(patch: Patch) -> None:
    async def worker_started(controller: Controller, service: str) -> None:
        return

    patch.setattr(Controller, "worker_started", worker_started)


def a_change_wakes_nobody(patch: Patch) -> None:
    patch.setattr(Controller, "_move", lambda controller: controller._drawable.set())


MUTANTS: Sequence[Callable[[Patch], None]] = (
    off_by_one_in_the_limit,
    strictly_less_than_the_limit,
    one_group_too_many,
    block_looks_at_the_present_only,
    answers_of_an_overtaken_attempt_are_accepted,
    rows_are_never_released,
    rows_of_a_failed_attempt_are_not_released,
    a_drop_is_not_journaled,
    trained_is_told_before_it_is_written_down,
    a_step_runs_twice,
    a_lost_step_counts_as_trained,
    lost_rows_are_not_made_again,
    a_skipped_step_raises_the_version,
    batches_in_order_of_arrival,
    leases_are_not_relayed,
    a_late_joiner_gets_no_weights,
    a_change_wakes_nobody,
)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(
    mutant: Callable[[Patch], None], monkeypatch: Patch, random_scenario: Callable[[int], Scenario]
) -> None:
    mutant(monkeypatch)
    assert any(_fails(random_scenario(seed)) for seed in range(SEEDS)), "no invariant noticed"


def _fails(scenario: Scenario) -> bool:
    try:
        return simulate(scenario).version < scenario.steps
    except (AssertionError, AsyncrlError, TimeoutError, ExceptionGroup) as error:
        print(f"seed {scenario.seed}: {error!r}")  # noqa: T201
        return True
