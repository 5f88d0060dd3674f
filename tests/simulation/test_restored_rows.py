"""Rows of READY samples outlive the controller: a resume trains them within the bound, once, and samples the rest."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import GroupState, Stage
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.ledger import AttemptStarted
from asyncrl.controller.rollouts import Rollouts
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.errors import ArenaFull, AsyncrlError, PeerLost, RemoteError
from asyncrl.protocols.batch import BatchRef
from asyncrl.simulation.fakes.generation import FakeGeneration
from tests.simulation.simulated_run import FaultRates, Scenario, simulate

SEEDS = 60
Patch = pytest.MonkeyPatch
Draw = Callable[[int], Scenario]


@pytest.fixture
def deadly_scenario(random_scenario: Draw) -> Draw:
    """A random run whose controller dies again and again, while many samples wait for training."""

    def scenario(seed: int) -> Scenario:
        chance = random.Random(f"deadly {seed}")
        drawn = random_scenario(seed)
        means = {"generation": chance.choice((0.0, 60.0)), "row": chance.choice((0.0, 60.0))}
        faults = FaultRates(controller=chance.choice((10.0, 30.0)), power=0.5, **means)
        return replace(drawn, faults=faults, checkpoint_every=1, admission="full", greedy=chance.random() < 0.2)

    return scenario


def test_resumes_train_what_waited_for_training(deadly_scenario: Draw) -> None:
    restored = 0
    policies = set()
    for seed in range(SEEDS):
        scenario = deadly_scenario(seed)
        result = simulate(scenario)
        assert result.version >= scenario.steps, f"seed {seed} stopped at version {result.version}"
        restored += result.restored
        policies |= {scenario.policy, "greedy" if scenario.greedy else "group"} if result.restored else set()
    assert restored > SEEDS
    assert len(policies) == 6, f"samples were restored under {policies} only"


@pytest.mark.parametrize("error", [ArenaFull("no slot"), PeerLost("died"), RemoteError("OSError", "", "", 0, ""), None])
def test_a_resume_goes_on_when_rows_cannot_be_restored(
    error: Exception | None, deadly_scenario: Draw, monkeypatch: Patch
) -> None:
    """Or when only some of them can be."""
    whole = FakeGeneration.restore_rows

    async def restore_rows(service: FakeGeneration, directory: str, samples: BatchRef) -> BatchRef:
        if error is not None:
            raise error
        return await whole(service, directory, samples.take(range(len(samples) // 2)))

    monkeypatch.setattr(FakeGeneration, "restore_rows", restore_rows)
    wanted = 0
    for seed in range(SEEDS // 6):
        result = simulate(scenario := deadly_scenario(seed))
        assert result.version >= scenario.steps, f"seed {seed} stopped at version {result.version}"
        wanted += result.restored
    assert wanted


# ---- mutants ---------------------------------------------------------------------------------------------


def a_restored_sample_keeps_its_incarnation(patch: Patch) -> None:
    whole = FakeGeneration.restore_rows

    async def restore_rows(service: FakeGeneration, directory: str, samples: BatchRef) -> BatchRef:
        rows = await whole(service, directory, samples)
        return BatchRef(tuple(row._replace(incarnation=row.incarnation - 1) for row in rows))

    patch.setattr(FakeGeneration, "restore_rows", restore_rows)


def a_restored_sample_begins_again_too(patch: Patch) -> None:
    whole = Journal.resume

    def resume(journal: Journal, incarnation: int, offset: int, ledger: Any, restored: Any) -> None:
        whole(journal, incarnation, offset, ledger, restored)
        for group, members in restored:
            number = journal.ledger.groups[group].attempt + 1
            journal.append(AttemptStarted(group, number, members, "resumed"))

    patch.setattr(Journal, "resume", resume)


def the_gate_samples_a_restored_sample_again(patch: Patch) -> None:
    whole = Gate.restore

    def restore(gate: Gate, drawn: GroupState) -> None:
        samples = [
            replace(sample, stage=Stage.RUNNING) if sample.stage is Stage.READY else sample for sample in drawn.samples
        ]
        whole(gate, replace(drawn, samples=samples))

    patch.setattr(Gate, "restore", restore)


def a_restored_sample_counts_as_fresh(patch: Patch) -> None:
    """It is trained past its bound: the gate takes the version of the resume for that of its tokens."""
    whole = Gate.restore

    def restore(gate: Gate, drawn: GroupState) -> None:
        version = gate.version
        whole(gate, replace(drawn, samples=[replace(each, first=version, last=version) for each in drawn.samples]))

    patch.setattr(Gate, "restore", restore)
    patch.setattr(SampleTracker, "restored", lambda tracker, row: tracker._keep(tracker.gate.group(row.group), row))


def a_group_that_lacks_its_greedy_answer_is_forgotten(patch: Patch) -> None:
    """Only groups with a member that runs are rolled out after a resume."""
    whole = Rollouts.unfinished

    def unfinished(rollouts: Rollouts, group: int) -> bool:
        begins = group not in rollouts.running
        return bool(rollouts._gate.members(group, Stage.RUNNING)) if begins else whole(rollouts, group)

    patch.setattr(Rollouts, "unfinished", unfinished)


MUTANTS: Mapping[Callable[[Patch], None], str] = {
    a_restored_sample_keeps_its_incarnation: "of another incarnation",
    a_restored_sample_begins_again_too: "were restored, and",
    the_gate_samples_a_restored_sample_again: "were restored, and",
    a_restored_sample_counts_as_fresh: "let a stale token through",
    a_group_that_lacks_its_greedy_answer_is_forgotten: "TimeoutError",
}
"""Each mutant and what the check that finds it says."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch, deadly_scenario: Draw) -> None:
    mutant(monkeypatch)
    greedy = mutant is a_group_that_lacks_its_greedy_answer_is_forgotten
    changes: dict[str, Any] = {"greedy": True, "finish": "drain"} if greedy else {}
    failures = filter(None, (_failure(replace(deadly_scenario(seed), **changes)) for seed in range(SEEDS)))
    assert any(MUTANTS[mutant] in failure for failure in failures), "no check noticed"


def _failure(scenario: Scenario) -> str:
    try:
        simulate(scenario)
    except (AssertionError, AsyncrlError, TimeoutError, ExceptionGroup) as error:
        print(f"seed {scenario.seed}: {error!r}")  # noqa: T201
        return repr(error)
    return ""
