"""Whole fleets play episodes while workers of all services die in the middle of them."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.simulation.faults.trial_execution import run_trial
from asyncrl.simulation.faults.trial_plan import Fault, Trial, draw_episodes
from tests.named_seed import named_seed

SEEDS, PART, RESUMED = 150, 50, 25


def resumed_episodes(seed: int) -> Trial:
    """Draws a trial with episodes whose controller dies twice, after checkpoints at each step."""
    chance, trial = random.Random(f"resumed {seed}"), draw_episodes(seed)
    deaths = [Fault("controller", int(10 ** chance.uniform(2.4, 3.1)), power=chance.random() < 0.5) for _ in range(2)]
    sizes: dict[str, Any] = {
        "limit": chance.randint(1, 3),
        "groups": 2,
        "members": 3,
        "slots": 6,
        "steps": 4,
        "turns": 4,
    }
    return replace(trial, checkpoint_every=1, faults=(*trial.faults[:2], *deaths), **sizes)


@pytest.mark.parametrize("start", range(0, SEEDS, PART))
def test_nothing_of_an_episode_is_lost_or_trained_twice(start: int) -> None:
    seen = Counter[str]()
    for seed in range(start, start + PART):
        with named_seed(seed):
            outcome = run_trial(draw_episodes(seed))
        seen.update(f"{fault.kind} {fault.target}" for fault in outcome.faults.injected)
        seen["restarted"] += outcome.restarted
    assert seen["kill environment"] > 10
    assert seen["kill generation"] > 3
    assert seen["restarted"] > PART


def test_episodes_go_on_after_the_controller_dies() -> None:
    """Episodes in the checkpoint begin at their last turn: no token is over the limit, none trains twice."""
    continued, policies = 0, set[str]()
    for seed in range(RESUMED):
        trial = resumed_episodes(seed)
        with named_seed(seed):
            outcome = run_trial(trial)
        continued += outcome.truth.continued
        policies |= {trial.policy} if outcome.truth.continued else set()
    assert continued > RESUMED / 4
    assert policies == {"mask", "drop", "block", "admit"}


def test_the_same_seed_plays_the_same_episodes() -> None:
    assert run_trial(draw_episodes(3)).digest == run_trial(draw_episodes(3)).digest
