"""A group that kills its workers is dropped; groups whose workers are killed from outside are not."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from asyncrl.simulation.fakes.generation import Lengths, lognormal, stragglers
from asyncrl.simulation.fakes.training import StepCost
from asyncrl.simulation.faults.trial_execution import run_trial
from asyncrl.simulation.faults.trial_plan import Fault, Trial, draw_trial
from tests.simulation.simulated_run import FaultRates, Scenario, simulate


@pytest.mark.parametrize("generators", [1, 2])
@pytest.mark.parametrize("poison", [0, 1, 3])
def test_a_group_that_kills_its_worker_each_time_is_dropped_and_no_other(poison: int, generators: int) -> None:
    outcome = run_trial(Trial(poison=(poison,), generators=generators, groups=2, steps=4))
    assert outcome.poisoned == [poison]
    assert (outcome.version, outcome.lives) == (4, 1)


def test_a_group_whose_samples_end_before_it_kills_its_worker_is_dropped_too() -> None:
    short = Trial(seed=63140, groups=1, members=2, limit=0, slots=2, cut_at=None, steps=1, poison=(0,))
    outcome = run_trial(replace(short, shape="lognormal", reward_time=0.0))
    assert outcome.poisoned == [0]
    assert (outcome.version, outcome.lives) == (1, 1)


def test_a_group_that_is_found_guilty_while_it_waits_for_its_turn_ends_there() -> None:
    """A greedy answer runs beside the samples in another worker, so that one attempt kills two; the second death is
    known when the attempt is over."""
    jump = Fault("jump", 44, seconds=1.0)
    delay = Fault("delay", 8, seconds=5.0)
    shape = {"groups": 2, "members": 2, "slots": 6, "steps": 2, "generators": 2}
    outcome = run_trial(
        Trial(
            seed=1372,
            latency=0.001,
            shape="lognormal",
            reward_time=1.0,
            unscorable=0.2,
            finish="drain",
            checkpoint_every=2,
            poison=(1,),
            faults=(jump, delay),
            greedy=True,
            **shape,
        )
    )
    assert outcome.poisoned == [1]
    assert outcome.version >= 2


def test_a_group_that_is_alone_in_flight_is_dropped_before_the_fleet_gives_up() -> None:
    outcome = run_trial(Trial(poison=(0,), groups=1, limit=0, cut_at=None))
    assert (outcome.poisoned, outcome.lives) == ([0], 1)


def test_a_group_that_kills_its_worker_is_found_among_other_deaths() -> None:
    kills = tuple(Fault("kill", at, service) for at in (80, 400) for service in ("generation", "reward"))
    outcome = run_trial(Trial(poison=(1,), generators=2, groups=2, steps=6, faults=kills))
    assert outcome.faults.injected
    assert outcome.poisoned == [1]


def test_a_group_whose_rows_fail_to_be_read_as_its_worker_dies_was_there() -> None:
    """Its call is given up then, before the worker is known to be dead."""
    faults = (Fault("controller", 42, power=False),)
    fewest = {"groups": 2, "members": 3, "limit": 0, "slots": 3, "cut_at": None, "steps": 1, "generators": 1}
    outcome = run_trial(
        Trial(
            seed=11260,
            **fewest,
            remote=True,
            latency=0.0,
            shape="lognormal",
            step_time=2.0,
            reward_time=0.0,
            checkpoint_every=2,
            poison=(1,),
            faults=faults,
        )
    )
    assert outcome.poisoned == [1]


def test_a_group_that_left_a_silent_worker_before_its_death_was_known_was_there() -> None:
    """Its rows cannot be read there, so that its attempt ends, and another group calls the dead worker."""
    faults = (
        Fault("delay", 3, seconds=5.0),
        Fault("cut", 9, seconds=20.0),
        Fault("repeat", 73, seconds=0.05),
        Fault("host", 100, target="reward"),
        Fault("host", 306, target="generation"),
        Fault("controller", 337, turns=8, power=True),
    )
    shape = {"groups": 1, "slots": 2, "flip_time": 0.3, "reward_time": 0.0, "latency": 0.1}
    outcome = run_trial(
        Trial(
            seed=29447,
            **shape,
            greedy=True,
            reference=True,
            remote=True,
            shape="lognormal",
            steps=6,
            poison=(2,),
            faults=faults,
        )
    )
    assert outcome.poisoned == [2]


SMALL = {"groups": 2, "members": 2, "slots": 5, "steps": 4, "flip_time": 0.3}


@pytest.mark.parametrize(
    "trial",
    [
        Trial(**SMALL, hosts=2, latency=0.1, limit=2, poison=(1,), faults=(Fault("host", 19, "generation", 3),)),
        Trial(**SMALL, limit=2, reward_time=1.0, poison=(0,), faults=(Fault("host", 22, "reward", 1),)),
        replace(draw_trial(8), poison=(0,)),
        replace(draw_trial(13), poison=(1,)),
    ],
)
def test_a_run_outlives_a_poisonous_group_beside_other_deaths(trial: Trial) -> None:
    """The worker that the group crashes dies of something else, too, before any group is finished."""
    outcome = run_trial(trial)
    assert outcome.faults.injected
    assert outcome.poisoned == list(trial.poison)
    assert outcome.ends == ["finished"]


def test_a_lost_host_that_one_suspect_had_for_itself_blames_no_healthy_group() -> None:
    kills = (Fault("kill", 12, "generation", 5), Fault("kill", 89, "generation", 3))
    others = (Fault("host", 154, "reward", 5), Fault("controller", 3, turns=3))
    trial = replace(draw_trial(1105), poison=(1,), faults=(*kills, *others))
    assert run_trial(trial).poisoned == [1]


def test_the_trials_know_poison() -> None:
    poisonous = [trial for trial in map(draw_trial, range(500)) if trial.poison]
    assert 20 < len(poisonous) < 80
    for trial in poisonous[:5]:
        healthy = run_trial(replace(trial, poison=(), faults=()))
        assert healthy.poisoned == []


@pytest.mark.parametrize("lengths", [lambda: stragglers(50, 0.05, 5), lambda: lognormal(80, 0.5)])
@pytest.mark.parametrize("seed", range(2))
def test_healthy_groups_outlive_a_kill_every_twenty_seconds(lengths: Callable[[], Lengths], seed: int) -> None:
    """Groups of five to forty seconds; one of three workers is killed each time."""
    scenario = Scenario(
        seed=seed,
        groups=4,
        members=4,
        slots=48,
        cut_at=2,
        steps=100,
        lengths=lengths(),
        reference=0.1,
        cost=StepCost(1.0),
        faults=FaultRates(generation=60.0, reward=60.0, reference=60.0, restart=3.0),
        thorough=False,
    )
    result = simulate(scenario)
    assert result.attempts_failed > 20
    assert "poison" not in result.dropped.values()
