"""Ranks of a trainer die at random points, also between two exchanges of a step: it is on all ranks or on none, and all
go on from the newest checkpoint."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.simulation.faults.simulate_command import outcome_of
from asyncrl.simulation.faults.trial_execution import ControllerLife, run_trial
from asyncrl.simulation.faults.trial_plan import draw_ranks
from asyncrl.simulation.faults.trial_services import TrialTrainingRank
from tests.named_seed import named_seed, starts

CORE = 20
SEEDS = 40
PART = 10
MUTANT_SEEDS = 60
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("start", starts(CORE, SEEDS, PART))
def test_random_deaths_of_ranks_hold_every_invariant(start: int) -> None:
    returned = 0
    seen = Counter[str]()
    for seed in range(start, start + PART):
        with named_seed(seed):
            outcome = run_trial(draw_ranks(seed))
        returned += outcome.returns
        seen.update(end.partition("(")[0] for end in outcome.ends)
    assert seen["finished"] == PART
    assert returned >= PART


@pytest.mark.parametrize("seed", [1, 5, 9])
def test_the_same_seed_gives_the_same_history(seed: int) -> None:
    assert run_trial(draw_ranks(seed)).digest == run_trial(draw_ranks(seed)).digest


# ---- mistakes --------------------------------------------------------------------------------------------


def a_rank_counts_its_own_samples_alone(patch: Patch) -> None:
    async def give(rank: TrialTrainingRank, value: Any) -> list[Any]:
        return [value]

    patch.setattr(TrialTrainingRank, "_give", give)


def the_journal_is_not_resumed(patch: Patch) -> None:
    async def resumed(life: Any, _: Any) -> Any:
        return life

    patch.setattr(ControllerLife, "_resumed", resumed)


MUTANTS: list[Callable[[Patch], None]] = [a_rank_counts_its_own_samples_alone, the_journal_is_not_resumed]


@pytest.mark.parametrize("mistake", MUTANTS, ids=lambda mistake: mistake.__name__)
def test_a_broken_step_of_several_ranks_is_found(mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mistake(monkeypatch)
    found = (seed for seed in range(MUTANT_SEEDS) if isinstance(outcome_of(draw_ranks(seed)), BaseException))
    assert next(found, None) is not None, f"{MUTANT_SEEDS} seeds did not find it"
