"""The real controller takes as long as the laws of asynchronous training say, on stages with a decode-rate curve."""

import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from asyncrl.bench.overlap.accounting import Overlap
from asyncrl.bench.overlap.comparison.side_run import SideRequest, run_side
from asyncrl.bench.overlap.emulation.stage_times import LengthSpread, StageTimes
from asyncrl.protocols.seeds import group_seed, member_seed

WITHIN = 0.05
SEED, BATCH, STEPS = 3, 64, 11
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
