"""One stale token far from the policy that sampled it is never the whole step, and never skips it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm_config import PRESETS, AlgorithmConfig
from asyncrl.engines.training.batch.masking import mask_rows
from asyncrl.engines.training.batch.micro_batches import micro_batch
from asyncrl.engines.training.batch.train_rows import TrainRow
from asyncrl.engines.training.policy_loss_terms import policy_loss_terms
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import run_step


def gradient_of(algorithm: AlgorithmConfig, log_ratio: float, advantage: float) -> float:
    """Returns the gradient of the log-prob of a single token in the loss."""
    one = np.ones(1, np.int64)
    row = TrainRow(0, 0, 0, 1, one, one, np.full(1, -log_ratio - 1, np.float32), 5 * one, advantage)
    masked = mask_rows([row], 1, 5, 2, "mask", False)
    masked[0].weight = 1.0
    current = torch.tensor([-1.0], requires_grad=True)
    terms = policy_loss_terms(algorithm, 0.0, 1e9, current, torch.zeros(1), micro_batch(masked, torch.device("cpu")))
    (gradient,) = torch.autograd.grad(terms.policy.sum() + terms.kl.sum(), current)
    return float(gradient)


@pytest.mark.parametrize("log_ratio", [1.2, 5.0, 20.0, 60.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_the_default_gradient_of_a_token_is_at_most_three_times_that_of_a_fresh_one(
    log_ratio: float, advantage: float
) -> None:
    assert abs(gradient_of(AlgorithmConfig(), 0.0, advantage)) == pytest.approx(1)
    assert abs(gradient_of(AlgorithmConfig(), log_ratio, advantage)) <= 3
    assert abs(gradient_of(AlgorithmConfig(), np.log(2.9), -1.0)) == pytest.approx(2.9, rel=1e-5), "held from 3 on"


def test_without_the_dual_clip_that_gradient_is_as_large_as_the_ratio() -> None:
    assert gradient_of(AlgorithmConfig(dual_clip=1e9), 19.9, -1.0) == pytest.approx(np.exp(19.9), rel=1e-4)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_other_presets_have_the_objective_of_their_paper(preset: str) -> None:
    assert AlgorithmConfig(preset=preset).dual_clip == (3.0 if preset == "grpo" else None)


@pytest.mark.parametrize(("clip_high", "dual_clip"), [(0.28, 3.0), ("0.28", 3.0), (2.5, None), ("2.5", None)])
def test_the_default_lies_beyond_the_bound_of_the_ratio_however_that_is_written(
    clip_high: float | str, dual_clip: float | None
) -> None:
    assert AlgorithmConfig.model_validate({"clip_high": clip_high}).dual_clip == dual_clip


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"ppo", "safe_rlhf"}))
@pytest.mark.parametrize("log_ratio", [-200.0, -90.0, 90.0, 200.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_no_objective_overflows(preset: str, log_ratio: float, advantage: float) -> None:
    assert np.isfinite(gradient_of(AlgorithmConfig(preset=preset), log_ratio, advantage))


@pytest.mark.parametrize("preset", ["grpo", "dapo", "sapo"])
def test_a_token_that_was_all_but_impossible_skips_no_step(preset: str, tiny: Path, make_rows: Callable) -> None:
    rows = make_rows(4)
    far = dataclasses.replace(rows[1], logprobs=rows[1].logprobs - 120, advantage=-1.0)
    sections = {"model": {"name": "tiny"}, "task": {"prompts": "none"}, "algorithm": {"preset": preset}}
    outcome = run_step(PolicyTrainer(Config.model_validate(sections), tiny), [rows[0], far, *rows[2:]], 1, 5)
    assert (outcome.updates, outcome.skipped, len(outcome.trained)) == (1, "", 4)
    assert all(np.isfinite(value) for value in outcome.metrics.values())
