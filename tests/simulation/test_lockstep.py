"""Fleets in lockstep meet random faults, and every invariant holds; what hangs is found although the trainer waits."""

from collections import Counter

import pytest

from asyncrl.simulation.fakes.training import FakeTraining
from asyncrl.simulation.faults.trial_execution import run_trial
from asyncrl.simulation.faults.trial_plan import Fault, Trial, draw_lockstep
from tests.named_seed import named_seed, starts

CORE = 20
SEEDS = 40
PART = 20
HUNG = Trial(seed=1, admission="lockstep", limit=1, steps=6, faults=(Fault("hang", 200, "reward"),))


@pytest.mark.parametrize("start", starts(CORE, SEEDS, PART))
def test_random_faults_in_lockstep_hold_every_invariant(start: int) -> None:
    seen = Counter[str]()
    for seed in range(start, start + PART):
        with named_seed(seed):
            seen.update(end.partition("(")[0] for end in run_trial(draw_lockstep(seed)).ends)
    assert seen["finished"] == PART


def test_a_scorer_that_hangs_is_replaced_while_the_trainer_waits_for_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_trial(HUNG).ends == ["finished"]
    monkeypatch.setattr(FakeTraining, "finished", 0)
    with pytest.raises(Exception, match="did not answer step within"):
        run_trial(HUNG)
