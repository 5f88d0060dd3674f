"""Whole fleets play episodes while workers of all services die in the middle of them."""

from collections import Counter

import pytest

from asyncrl.simulation.faults.trial_execution import run_trial
from asyncrl.simulation.faults.trial_plan import draw_episodes

SEEDS, PART = 300, 100


@pytest.mark.parametrize("start", range(0, SEEDS, PART))
def test_nothing_of_an_episode_is_lost_or_trained_twice(start: int) -> None:
    seen = Counter[str]()
    for seed in range(start, start + PART):
        try:
            outcome = run_trial(draw_episodes(seed))
        except Exception as error:
            raise AssertionError(f"episodes of seed {seed}: {error!r}") from error
        seen.update(f"{fault.kind} {fault.target}" for fault in outcome.faults.injected)
        seen["restarted"] += outcome.restarted
    assert seen["kill environment"] > 10
    assert seen["kill generation"] > 3
    assert seen["restarted"] > PART


def test_the_same_seed_plays_the_same_episodes() -> None:
    assert run_trial(draw_episodes(3)).digest == run_trial(draw_episodes(3)).digest
