"""Modelled stages under the real controller: schedules whose truth is known."""

import random
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.simulation.fakes.training import StepCost
from asyncrl.simulation.planning import step_prediction
from asyncrl.simulation.planning.gpus import known_gpus
from asyncrl.simulation.planning.job_file import FixedSplit, JobTables, PlannedJob, planned
from asyncrl.simulation.planning.step_prediction import (
    MOST_SAMPLES,
    Sampled,
    SimulatedStages,
    StepPredictor,
    drawn_lengths,
    run_stages,
)

BASE = SimulatedStages(
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


# Predictions of jobs: intervals, calibration, splits, and fleets of ten thousand GPUs.
WORK = {"prompt_tokens": 256, "response_tokens": 1000, "spread": 0.8, "samples": 64, "samples_per_prompt": 8}
HALVES = FixedSplit(generation=8, training=8)


def job(hosts: int = 2, model: str = "qwen2.5-7b", gpu: str = "H100", **tables: Any) -> PlannedJob:
    given = {"models": {"actor": model}, "work": WORK, "devices": [{"gpu": gpu, "hosts": hosts}], **tables}
    return planned(JobTables.model_validate(given), known_gpus())


def test_a_prediction_is_an_interval_and_its_levels_are_runs() -> None:
    found = StepPredictor(job()).predict(HALVES, 1)
    assert found.seconds.low < found.seconds.likely < found.seconds.high
    assert found.seconds.likely == found.likely.seconds
    assert 0 < found.likely.generating <= 1
    assert 0 < found.likely.training <= 1


def test_overlap_is_faster_than_all_gpus_in_turn_when_lengths_have_a_tail() -> None:
    predictor = StepPredictor(job())
    gain = predictor.predict(predictor.best_split(2), 2).speedup_over(predictor.predict(None, 0))
    assert gain.low > 1.1


def test_a_measured_step_calibrates_what_is_predicted() -> None:
    """The measured setting itself comes out as measured; twice the measured seconds make a step twice as long."""
    plain = StepPredictor(job()).predict(None, 0)
    trained = plain.likely.training * plain.likely.seconds
    stages = {"generation_seconds": 2 * (plain.likely.seconds - trained), "training_seconds": 2 * trained}
    found = StepPredictor(job(measured=stages)).predict(None, 0)
    assert found.seconds.likely == pytest.approx(2 * plain.seconds.likely, rel=0.03)
    assert found.seconds.high / found.seconds.low < 1.4 < plain.seconds.high / plain.seconds.low


def test_the_best_split_gives_the_slower_side_more() -> None:
    long = {**WORK, "response_tokens": 8000}
    assert StepPredictor(job(work=long)).best_split(2).generation >= StepPredictor(job()).best_split(2).generation
    many = {**WORK, "updates": 64}
    assert StepPredictor(job(work=many)).best_split(2).training >= StepPredictor(job()).best_split(2).training


def test_of_many_samples_a_share_is_simulated_with_the_share_of_the_replicas() -> None:
    sampled = Sampled.of(job(work={**WORK, "samples": 16384}), replicas=1250)
    assert sampled.samples <= MOST_SAMPLES + WORK["samples_per_prompt"]
    assert sampled.samples / 16384 == pytest.approx(sampled.replicas / 1250, rel=0.02)
    assert sampled.longest * sampled.unit >= 8 * 1000


def test_ten_thousand_gpus_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 512 samples a step three runs take 5 s of CPU time on the machine of docs/log.md."""
    monkeypatch.setattr(step_prediction, "MOST_SAMPLES", 64)
    found = StepPredictor(job(1250, work={**WORK, "samples": 32768})).predict(
        FixedSplit(generation=7000, training=3000), 1
    )
    assert found.seconds.low > 0


def test_a_split_of_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"split: 9 \+ 8 GPUs of 16"):
        StepPredictor(job()).predict(FixedSplit(generation=9, training=8), 1)
    with pytest.raises(ConfigError, match="training of llama-70b does not fit on 1 GPUs: give it more"):
        StepPredictor(job(model="llama-70b")).predict(FixedSplit(generation=8, training=1), 1)
