"""`asyncrl plan` predicts of ranks with parts, DeepSpeed's too, what they take, as torch counts it on CPUs."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sections.training_config import BUCKET
from asyncrl.deploy.checks.memory_needs import OFFLOADED, MemoryNeed, needs
from asyncrl.engines.models.model_shape import PACKAGED

SMOLLM2 = PACKAGED["pypi:smollm2"]
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed; scripts/test deepspeed installs it"
)

WITHIN = 0.1
TRIALS = [{"stage": 1}, {"stage": 2, "offload": True}, {"stage": 3}, {"stage": 3, "offload": True}]


def ratios_of(trials: list[dict[str, Any]], folder: Path) -> list[list[float]]:
    """Returns predicted over measured bytes of both ranks of each trial."""
    command = [sys.executable, "-m", "tests.unit.deploy.checks.ranks_memory_process", str(folder), json.dumps(trials)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280).stdout
    found: list[list[float]] = json.loads(shown.splitlines()[-1])
    return found


@needs_deepspeed
@pytest.mark.timeout(300)
def test_a_rank_of_deepspeed_takes_what_is_predicted_within_a_tenth(tmp_path: Path) -> None:
    trials = [{"engine": "deepspeed", "deepspeed": zero, "layout": {"dp": 2}} for zero in TRIALS]
    for zero, ratios in zip(TRIALS, ratios_of(trials, tmp_path), strict=True):
        assert ratios == pytest.approx([1, 1], abs=WITHIN), zero


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "part", ["shard", *(pytest.param(each, marks=pytest.mark.long) for each in ("tp", "pp", "sp"))]
)
def test_ranks_with_parts_take_what_is_predicted_within_a_tenth(part: str, tmp_path: Path) -> None:
    assert ratios_of([{"layout": {part: 2}}], tmp_path) == [pytest.approx([1, 1], abs=WITHIN)]


def _zero_need(stage: int, *, offload: bool = False, **training: Any) -> list[MemoryNeed]:
    zero = {"engine": "deepspeed", "deepspeed": {"stage": stage, "offload": offload}, "layout": {"dp": 4}}
    values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "training": {**zero, **training}}
    return needs(Config.model_validate(values), SMOLLM2)


def test_ranks_of_deepspeed_hold_shares_by_the_stage() -> None:
    all_weights = 4 * SMOLLM2.parameters
    bucket = 4 * BUCKET
    share = all_weights // 4
    stages = [next(each.parts for each in _zero_need(stage) if each.name == "training") for stage in (1, 2, 3)]
    assert [parts["weights"] for parts in stages] == [all_weights, all_weights, share]
    assert [parts["gradients"] for parts in stages] == [
        all_weights + max(share, bucket),
        share + bucket,
        share + bucket,
    ]
    assert [parts["optimizer"] for parts in stages] == [3 * share] * 3
    assert ["gathered" in parts for parts in stages] == [False, False, True]


def test_a_step_of_stage_2_takes_its_gradients_in_one_piece_and_a_denominator_for_each() -> None:
    small = {"gradient_checkpointing": True, "micro_batch_tokens": 600, "logits_chunk": 16}
    share = SMOLLM2.parameters
    stages = [next(each.parts for each in _zero_need(stage, **small) if each.name == "training") for stage in (1, 2)]
    assert stages[0]["activations"] < stages[1]["activations"] == 2 * share
    offloaded = next(each.parts for each in _zero_need(2, offload=True, **small) if each.name == "training")
    assert offloaded["activations"] == stages[0]["activations"]


def test_what_ranks_on_gpus_offload_counts_as_memory_of_the_host() -> None:
    share = SMOLLM2.parameters
    here = next(each for each in _zero_need(3, offload=True) if each.name == "training")
    assert here.parts["optimizer"] == 5 * share
    found = {each.name: each for each in _zero_need(3, offload=True, device="cuda")}
    assert found["training"].parts["optimizer"] == 0
    assert (found[OFFLOADED].device, found[OFFLOADED].bytes) == ("cpu", 4 * 5 * share)
    assert OFFLOADED not in {each.name for each in _zero_need(3, device="cuda")}
