"""Ranks of a trainer die at random points, and the others save what they hold, all of it or parts: no step is trained
twice or lost."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from asyncrl.controller.journal import returns
from asyncrl.errors import Refused
from asyncrl.fleet.changes.living_parts import LivingParts
from asyncrl.fleet.changes.living_state import LivingState
from asyncrl.protocols.messages import Checkpointed
from asyncrl.simulation.fakes.training import FakeTraining
from asyncrl.simulation.faults.simulate_command import outcome_of
from asyncrl.simulation.faults.trial_execution import run_trial
from asyncrl.simulation.faults.trial_plan import Fault, Trial, draw_parts, draw_ranks
from asyncrl.simulation.faults.trial_ranks import TrialTrainingRank
from tests.named_seed import named_seed

SEEDS, PART = 40, 10
OF_PARTS = 8
MUTANT_SEEDS = 60
Patch = pytest.MonkeyPatch


@pytest.fixture
def saved(monkeypatch: Patch) -> Counter[bool]:
    """Counts whether a return found a state that a living rank held."""
    counts, save = Counter[bool](), returns.save_living_state

    async def counted(*args: Any) -> LivingState | None:
        found = await save(*args)
        counts[found is not None] += 1
        return found

    monkeypatch.setattr(returns, "save_living_state", counted)
    return counts


@pytest.mark.parametrize("start", range(0, SEEDS, PART))
def test_random_deaths_of_ranks_hold_every_invariant(start: int, saved: Counter[bool]) -> None:
    seen = Counter[str]()
    for seed in range(start, start + PART):
        with named_seed(seed):
            outcome = run_trial(draw_ranks(seed))
        seen.update(end.partition("(")[0] for end in outcome.ends)
    assert seen["finished"] == PART
    assert saved[True] >= PART


def test_random_deaths_of_ranks_with_parts_hold_every_invariant(saved: Counter[bool]) -> None:
    _hold_every_invariant_with_parts(range(OF_PARTS), saved)


@pytest.mark.long
def test_many_random_deaths_of_ranks_with_parts_hold_every_invariant(saved: Counter[bool]) -> None:
    _hold_every_invariant_with_parts(range(OF_PARTS, 400), saved)


def _hold_every_invariant_with_parts(seeds: range, saved: Counter[bool]) -> None:
    finished = 0
    for seed in seeds:
        with named_seed(seed):
            finished += run_trial(draw_parts(seed)).ends[-1] == "finished"
    assert finished == len(seeds)
    assert saved[True] >= len(seeds)
    assert saved[False] >= 1, "some ranks had begun an update, or the last copy of a part was lost"


@pytest.mark.parametrize("seed", [1, 5, 9])
def test_the_same_seed_gives_the_same_history(seed: int) -> None:
    assert run_trial(draw_ranks(seed)).digest == run_trial(draw_ranks(seed)).digest


def test_deaths_of_ranks_that_leave_one_behind_never_end_a_run(saved: Counter[bool]) -> None:
    """Each makes a newer checkpoint, so that one return to each is enough, and the first one is never needed again."""
    deaths = tuple(Fault("kill", at, "training", turns=3) for at in (150, 550, 950, 1350))
    shape = Trial(seed=1, ranks=2, steps=30, step_time=2.0, checkpoint_every=100, returns=1, faults=deaths)
    outcome = run_trial(shape)
    assert (outcome.lives, outcome.returns, saved[True]) == (1, 4, 4)


# ---- mistakes --------------------------------------------------------------------------------------------


def a_rank_whose_step_has_not_ended_gives_its_state(patch: Patch) -> None:
    async def leave_ranks(rank: TrialTrainingRank, incarnation: int, version: int) -> None:
        rank._left_ranks.set()
        rank._check("copy", incarnation, version)

    patch.setattr(TrialTrainingRank, "leave_ranks", leave_ranks)


def a_rank_gives_the_state_of_any_version(patch: Patch) -> None:
    async def leave_ranks(rank: TrialTrainingRank, incarnation: int, version: int) -> None:
        rank._left_ranks.set()

    patch.setattr(TrialTrainingRank, "leave_ranks", leave_ranks)
    patch.setattr(FakeTraining, "_check", lambda *_: None)


def a_state_without_a_part_is_saved(patch: Patch) -> None:
    write = LivingParts.write

    async def write_what_is_there(parts: LivingParts, directory: str) -> list[Checkpointed]:
        try:
            return await write(parts, directory)
        except Refused:
            if not parts._made:
                raise
            return [*parts._made.values()]

    patch.setattr(LivingParts, "write", write_what_is_there)


Draw = Callable[[int], Trial]
MUTANTS: Mapping[tuple[Callable[[Patch], None], Draw], int] = {
    (a_rank_whose_step_has_not_ended_gives_its_state, draw_ranks): 3,
    (a_rank_gives_the_state_of_any_version, draw_ranks): 3,
    (a_rank_gives_the_state_of_any_version, draw_parts): 3,
    (a_state_without_a_part_is_saved, draw_parts): 35,
}
"""Mistakes with trials, each with a seed from which on seeds find it."""


@pytest.mark.parametrize(("mutant", "start"), MUTANTS.items(), ids=lambda each: "" if type(each) is int else _id(*each))
def test_a_broken_rescue_is_found(mutant: tuple[Callable[[Patch], None], Draw], start: int, monkeypatch: Patch) -> None:
    mistake, draw = mutant
    mistake(monkeypatch)
    seeds = range(start, start + MUTANT_SEEDS)
    found = (seed for seed in seeds if isinstance(outcome_of(draw(seed)), BaseException))
    assert next(found, None) is not None, f"{MUTANT_SEEDS} seeds did not find it"


def _id(mistake: Callable[[Patch], None], draw: Draw) -> str:
    return f"{mistake.__name__}-{draw.__name__}"
