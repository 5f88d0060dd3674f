"""Each definition gives what a small case gives by hand."""

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from asyncrl.bench import cli
from asyncrl.bench.overlap import accounting
from asyncrl.bench.overlap.accounting import Overlap, mfu_of, peak_flops
from asyncrl.bench.overlap.side_run import SideRequest, run_side
from asyncrl.bench.overlap.timed_services import LengthSpread, StageTimes
from asyncrl.deploy.report.run_record import read_run
from asyncrl.errors import ConfigError
from asyncrl.protocols.seeds import group_seed, member_seed

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy" / "report"))
from recorded_runs import SAMPLE, recorded_run, step


def test_efficiencies_divide_what_explains_a_step_by_the_step() -> None:
    assert accounting.overlap_efficiency([2.0, 4.0, 1.0], 5.0) == 0.8
    assert accounting.bound([2.0, 4.0], 9.0, 2) == 4.0
    assert accounting.bound([2.0, 4.0], 15.0, 2) == 5.0
    assert accounting.bound_efficiency([2.0, 4.0], 9.0, 2, 5.0) == 0.8
    assert accounting.bound_efficiency([2.0, 4.0], 15.1, 2, 5.0) == 1.0


def test_bubbles_are_weighted_by_devices() -> None:
    assert accounting.bubble_ratio(3.0, 4.0) == 0.25
    busy = {"generation": 4.0, "training": 2.0}
    devices = {"generation": 3.0, "training": 1.0}
    assert accounting.cluster_bubble(busy, devices, 4.0) == 0.125


def test_the_overlap_fraction_is_the_common_time_over_the_rarer() -> None:
    generation = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]
    assert accounting.overlap_fraction(generation, [(2.5, 5.5)]) == pytest.approx(1.0 / 3.0)
    assert accounting.overlap_fraction(generation, [(0.5, 1.5)]) == 1.0
    assert accounting.overlap_fraction(generation, [(3.0, 5.0)]) == 0.0
    assert accounting.overlap_fraction(generation, []) is None


def test_gains_are_ratios_to_a_named_baseline() -> None:
    assert accounting.speedup(6.0, 4.0) == 1.5
    assert accounting.contention(1.2, 1.0) == 1.2
    assert accounting.overlap_yield(6.0, 4.0, 3.5) == 0.8
    assert math.isnan(accounting.overlap_yield(3.0, 3.0, 3.0)), "one stage alone takes as long as a synchronous step"


def test_rates_count_all_devices() -> None:
    assert accounting.goodput(1000.0, 2.0, 5) == 100.0
    assert accounting.forward_flops(10.0, 3.0) == 60.0
    assert accounting.forward_flops(10.0, 3.0, attention=2.0, context=5.0) == 180.0
    assert accounting.loop_mfu(60.0, 30.0, 2.0, 5, 30.0) == 0.5


# The real controller takes as long as the laws of asynchronous training say, on stages with a decode-rate curve.
WITHIN = 0.05
SEED = 3
BATCH = 64
STEPS = 11
LENGTHS = LengthSpread(64.0, 1.0, 448)
TIMES = StageTimes(LENGTHS, token=0.16, each=0.002, trained_token=0.004, load=1.0)


def simulated(path: Path, limit: int, slots: int, **changes: Any) -> Overlap:
    """Runs one sample a group. changes: further keys of the config, and `update`."""
    update = changes.pop("update", "in flight")
    values = {
        "seed": SEED,
        "steps": STEPS,
        "task.prompts_per_step": BATCH,
        "task.samples_per_prompt": 1,
        "algorithm.advantage": "batch",
        "generation.slots": slots,
        "generation.max_new_tokens": LENGTHS.cap,
        "staleness.limit": limit,
        **changes,
    }
    times = replace(TIMES, update=update).options()
    return run_side(SideRequest("virtual", "quickstart", str(path / "run"), values=values, times=times))


def batches() -> list[list[int]]:
    """The lengths of each batch after the first, which is warm-up."""
    draw = LENGTHS.lengths()
    drawn = [draw(random.Random(member_seed(group_seed(SEED, group), 0))) for group in range(BATCH * STEPS)]
    return [drawn[start : start + BATCH] for start in range(BATCH, BATCH * STEPS, BATCH)]


def generation(batch: list[int]) -> float:
    """The seconds until all samples of a batch, which began together, have ended."""
    return TIMES.token * max(batch) + TIMES.each * sum(batch)


def training(batch: list[int]) -> float:
    return TIMES.trained_token * sum(batch)


def test_a_synchronous_step_is_the_sum_of_its_stages(tmp_path: Path) -> None:
    law = fmean(generation(batch) + training(batch) + TIMES.load for batch in batches())
    assert simulated(tmp_path, 0, BATCH).step == pytest.approx(law, rel=WITHIN)


def test_one_step_off_hides_training_and_not_the_tail(tmp_path: Path) -> None:
    law = fmean(max(generation(batch) + TIMES.load, training(batch)) for batch in batches())
    found = simulated(tmp_path, 1, BATCH, update="drain", **{"staleness.policy": "block"})
    assert found.step == pytest.approx(law, rel=WITHIN)


def test_updates_in_flight_leave_the_slowest_stage_alone(tmp_path: Path) -> None:
    """Training here: four times the slots of a batch generate it in less."""
    found = simulated(tmp_path, 4, 4 * BATCH, steps=30)
    assert found.step == pytest.approx(TIMES.trained_token * found.tokens * found.step, rel=WITHIN)


# Loop MFU of a recorded run, from a model whose FLOPs are counted by hand.


SHAPE = {"vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
PARAMETERS = 2 * 10 * 4 + 2 * (4 * 4 * 4 + 3 * 4 * 8 + 2 * 4) + 4
"""Embeddings of both ends; in each layer four products of attention, three of the rest and two norms; the last norm."""


def run_of(path: Path) -> Path:
    numbers = {"tokens/trained": 100.0, "staleness/wasted_tokens": 20.0, "completions/length_mean": 6.0}
    samples = [replace(SAMPLE, prompt_ids=[1, 2, 3, 4], token_ids=[5], token_logprobs=[-1.0], token_versions=[0])]
    run = recorded_run(path, [step(n, 2.0 * n, **numbers) for n in range(1, 12)], samples)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text(json.dumps(SHAPE))
    return run


def test_sampled_tokens_count_once_and_trained_ones_three_times(tmp_path: Path) -> None:
    # A token attends to 4 tokens of its prompt and 3 of its completion: 4 FLOPs for each, 2 layers and 4 numbers.
    forward = 2 * PARAMETERS + 4 * 2 * 4 * (4 + 3)
    needed = (120 + 3 * 100) * forward
    run = read_run(run_of(tmp_path / "run"))
    assert mfu_of(run, peak=1e6) == pytest.approx(needed / (2.0 * 1e6 * run.devices))


def test_a_model_without_a_known_shape_is_named(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", [step(1, 1.0)])
    with pytest.raises(ConfigError, match="its model m has a shape that is not known"):
        mfu_of(read_run(run), 1e12)


def test_a_peak_is_a_known_gpu_or_a_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert 9e14 < peak_flops("H100") < 1e15
    assert peak_flops("1e12") == 1e12
    for text in ("A1", "-1", "0", "nan", "inf"):
        with pytest.raises(ConfigError, match="is no number above 0, and none of A100, H100"):
            peak_flops(text)
    monkeypatch.setattr(sys, "argv", ["asyncrl-bench", "overlap", "quickstart", "--peak", "H100"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--peak is for run directories" in capsys.readouterr().err
