import random
from collections.abc import Callable

import pytest

from asyncrl.simulation.fakes.generation import constant, lognormal, stragglers
from asyncrl.simulation.fakes.training import StepCost
from tests.simulation.simulated_run import FaultRates, Scenario


def _faults(chance: random.Random) -> FaultRates:
    return FaultRates(
        generation=chance.choice([0.0, 60.0, 240.0]),
        reward=chance.choice([0.0, 20.0]),
        reference=chance.choice([0.0, 15.0]),
        row=chance.choice([0.0, 25.0]),
        controller=chance.choice([0.0, 0.0, 20.0, 60.0]),
        power=0.5,
        restart=chance.choice([0.5, 5.0]),
    )


def _scenario(seed: int) -> Scenario:
    chance = random.Random(seed)
    members = chance.randint(2, 6)
    return Scenario(
        seed=seed,
        policy=chance.choice(["mask", "drop", "block", "admit"]),
        groups=chance.randint(1, 4),
        members=members,
        limit=chance.randint(0, 3),
        slots=chance.randint(3, 24),
        cut_at=chance.choice([None, 2, max(2, members // 2)]),
        steps=chance.randint(3, 8),
        lengths=chance.choice([constant(20), stragglers(10, 0.15, 10), lognormal(20, 0.8)]),
        flip_time=chance.choice([0.0, 0.0, 0.3]),
        cost=StepCost(
            fixed=chance.choice([0.0, 0.5, 4.0]),
            token=chance.choice([0.0, 0.002]),
            not_finite=chance.choice([0.0, 0.0, 0.05]),
            rejected=random.Random(f"rejected {seed}").choice([0.0, 0.0, 0.1]),
        ),
        reward_delay=chance.choice([0.0, 0.1, 3.0]),
        unscorable=chance.choice([0.0, 0.0, 0.1, 0.4]),
        reference=chance.choice([None, 0.0, 0.2]),
        faults=_faults(chance) if chance.random() < 0.6 else FaultRates(),
        finish=chance.choice(["abandon", "drain"]),
        deadline=20_000.0,
        need_signal=chance.random() < 0.25,
    )


@pytest.fixture
def random_scenario() -> Callable[[int], Scenario]:
    """A small run with everything drawn by chance from the seed: sizes, policy, durations, deaths."""
    return _scenario
