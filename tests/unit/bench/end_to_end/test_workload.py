import random

import pytest

from asyncrl.bench.end_to_end.compared_systems import asyncrl_result, trl_result
from asyncrl.bench.end_to_end.even_words_reward import share_of_even
from asyncrl.bench.end_to_end.workload import SAMPLES, lognormal, workloads
from asyncrl.bench.overhead.benchmark import bound


def test_lengths_are_lognormal_and_always_the_same() -> None:
    order = list(range(SAMPLES))
    random.Random(1).shuffle(order)
    lengths = lognormal(SAMPLES, 32, 1.0, 256, order)
    assert sorted(lengths) == sorted(lognormal(SAMPLES, 32, 1.0, 256, range(SAMPLES)))
    assert sorted(lengths)[SAMPLES // 2] == pytest.approx(32 * 0.6065, abs=1)  # median = mean / exp(sigma^2 / 2)
    assert (min(lengths) >= 1, max(lengths)) == (True, 256)
    assert 29 < sum(lengths) / SAMPLES < 32  # the cap takes a little


def test_every_workload_gives_each_sample_of_a_batch_a_length() -> None:
    assert {len(each.lengths) for each in workloads(32).values()} == {SAMPLES}


def test_the_reward_counts_even_words() -> None:
    assert share_of_even("w10 w3 w4 w9") == 0.5
    assert share_of_even("") == 0.0


def test_steps_of_the_warm_up_count_for_nothing() -> None:
    shares = {f"time/{stage}/busy": 0.5 for stage in ("generation", "reward", "training")}
    lines = [{"time": t, "tokens/trained": n, "reward/mean": t, **shares} for t, n in ((10, 999), (12, 10), (16, 20))]
    outcome = asyncrl_result(lines, warm=1)
    assert (outcome.rate, outcome.seconds, outcome.reward) == (5.0, 3.0, 16)
    assert outcome.stages == {"generation": 1.5, "reward": 1.5, "training": 1.5}


def test_what_trl_does_neither_in_generation_nor_in_reward_is_training() -> None:
    lines = [
        {"ended": ended, "tokens": tokens, "reward": 0.5, "generation": generation, "reward_seconds": 0.5}
        for ended, tokens, generation in ((5.0, 999, 99.0), (10.0, 20, 4.0), (15.0, 0, 0.0))
    ]
    outcome = trl_result(lines, warm=1)
    assert (outcome.rate, outcome.seconds) == (2.0, 5.0)
    assert outcome.stages == {"generation": 2.0, "reward": 0.5, "training": 2.5}


def test_a_step_takes_its_longest_stage_or_its_share_of_a_cycle() -> None:
    assert bound((0.2, 0.04, 0.04, 0.2)) == 0.2
    assert bound((0.1, 0.8, 0.0, 0.1)) == 0.8
    assert bound((0.0, 0.0, 0.0, 0.0)) == 0.0
