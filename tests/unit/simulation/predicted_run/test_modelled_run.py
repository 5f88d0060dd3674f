"""Modelled stages under the real controller: schedules whose truth is known."""

import random
from dataclasses import replace
from statistics import fmean

import pytest

from asyncrl.simulation.fakes.training import StepCost
from asyncrl.simulation.predicted_run.modelled_run import ModelledStages, drawn_lengths, run_stages

BASE = ModelledStages(
    groups=8,
    members=4,
    limit=0,
    slots=8,
    cut_at=None,
    steps=8,
    checkpoint_every=1 << 30,
    max_new_tokens=200,
    replicas=4,
    step=lambda sequences: 0.1,
    lengths=lambda chance: 100,
    cost=StepCost(5.0),
    warm_up=1,
    measured=4,
)


def test_a_synchronous_step_is_generation_and_then_training() -> None:
    found = run_stages(BASE)
    assert found.seconds == pytest.approx(10.0 + 5.0, rel=0.01)
    assert found.training == pytest.approx(5 / 15, rel=0.01)
    assert found.generating == pytest.approx(10 / 15, rel=0.01)
    assert (found.staleness, found.masked) == (0.0, 0.0)


@pytest.mark.parametrize(("training", "seconds"), [(5.0, 10.0), (20.0, 20.0)])
def test_an_overlapping_step_takes_as_long_as_its_slower_side(training: float, seconds: float) -> None:
    found = run_stages(replace(BASE, limit=2, steps=14, warm_up=4, cost=StepCost(training)))
    assert found.seconds == pytest.approx(seconds, rel=0.02)
    assert max(found.generating, found.training) == pytest.approx(1.0, rel=0.02)


def test_a_replica_slows_down_by_the_sequences_that_it_holds() -> None:
    slow = run_stages(replace(BASE, step=lambda sequences: 0.01 * sequences))
    assert slow.seconds == pytest.approx(0.01 * 8 * 100 + 5, rel=0.01)


def test_a_sequence_speeds_up_when_others_end() -> None:
    """Two sequences of 100 and 200 tokens: 100 steps of two, then 100 steps of one."""
    lengths = iter([100, 200] * 50)
    stages = replace(
        BASE, groups=1, members=2, replicas=1, step=lambda held: 0.1 * held, lengths=lambda chance: next(lengths)
    )
    assert run_stages(stages).seconds == pytest.approx(100 * 0.2 + 100 * 0.1 + 5, rel=0.01)


def test_fewer_slots_than_sequences_make_waves() -> None:
    assert run_stages(replace(BASE, slots=4)).seconds == pytest.approx(20 + 5, rel=0.01)


def test_new_weights_pause_replicas() -> None:
    quick, paused = (
        run_stages(replace(BASE, limit=2, steps=14, warm_up=4, cost=StepCost(1.0), pause=pause)) for pause in (0.0, 2.0)
    )
    assert paused.seconds - quick.seconds == pytest.approx(2.0, rel=0.1)


def test_tokens_that_are_too_old_count_as_not_trained() -> None:
    """A straggler of ten steps loses most tokens under limit 1; a step is longer by what is not trained."""
    lengths = drawn_lengths(60, 1.2, 800)
    found = run_stages(
        replace(BASE, limit=1, steps=16, warm_up=3, measured=8, lengths=lengths, max_new_tokens=800, cost=StepCost(1.0))
    )
    assert 0.02 < found.masked < 0.6
    assert 0.3 < found.staleness <= 1.0


def test_drawn_lengths_have_the_mean_that_was_asked_for() -> None:
    chance = random.Random(1)
    draw = drawn_lengths(500, 0.8, 100_000)
    assert fmean(draw(chance) for _ in range(20_000)) == pytest.approx(500, rel=0.03)
    assert max(drawn_lengths(500, 0.8, 600)(chance) for _ in range(100)) == 600
