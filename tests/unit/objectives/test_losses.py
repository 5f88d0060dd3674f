"""The clipped objective and its averages against float64 formulas and finite differences."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.objectives.losses import clip_binds, clipped_policy_loss, row_weights

LOW, HIGH = 0.2, 0.28


def formula(log_ratio: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    ratio = np.exp(log_ratio)
    return -np.minimum(ratio * advantages, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantages)


def random_terms(seed: int = 0, tokens: int = 200) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(0, 0.4, tokens), draw.normal(0, 1, tokens)


def test_policy_loss_is_the_formula() -> None:
    log_ratio, advantages = random_terms()
    loss = clipped_policy_loss(torch.tensor(log_ratio), torch.tensor(advantages), LOW, HIGH)
    np.testing.assert_allclose(loss.numpy(), formula(log_ratio, advantages), rtol=1e-12)


def test_policy_gradient_is_that_of_finite_differences() -> None:
    log_ratio, advantages = random_terms()
    variable = torch.tensor(log_ratio, requires_grad=True)
    clipped_policy_loss(variable, torch.tensor(advantages), LOW, HIGH).sum().backward()
    step = 1e-6
    slope = (formula(log_ratio + step, advantages) - formula(log_ratio - step, advantages)) / (2 * step)
    np.testing.assert_allclose(variable.grad.numpy(), slope, atol=1e-7)


def test_clip_binds_exactly_where_the_gradient_is_zero() -> None:
    log_ratio, advantages = random_terms(seed=1)
    variable = torch.tensor(log_ratio, requires_grad=True)
    loss = clipped_policy_loss(variable, torch.tensor(advantages), LOW, HIGH)
    loss.sum().backward()
    binds = clip_binds(variable.detach().exp(), torch.tensor(advantages), LOW, HIGH)
    assert binds.any()
    assert torch.equal(binds, variable.grad == 0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_clip_high_bounds_rises_and_clip_low_bounds_falls(advantage: float) -> None:
    ratios = torch.tensor([0.5, 1.0, 2.0]).log()
    loss = clipped_policy_loss(ratios, torch.full((3,), advantage), LOW, HIGH)
    expected = [-0.5, -1.0, -(1 + HIGH)] if advantage > 0 else [1 - LOW, 1.0, 2.0]
    torch.testing.assert_close(loss, torch.tensor(expected))


lengths = st.lists(st.integers(1, 50), min_size=1, max_size=20)


@given(lengths)
def test_token_mean_is_the_mean_over_all_tokens(rows: list[int]) -> None:
    weights = row_weights("token_mean", torch.tensor(rows), sum(rows), len(rows), 64)
    np.testing.assert_allclose(float((weights * torch.tensor(rows)).sum()), 1.0, rtol=1e-5)
    assert len(set(weights.tolist())) == 1


@given(lengths)
def test_sequence_mean_counts_every_sample_alike(rows: list[int]) -> None:
    weights = row_weights("sequence_mean", torch.tensor(rows), sum(rows), len(rows), 64)
    per_sample = weights * torch.tensor(rows)
    np.testing.assert_allclose(per_sample.numpy(), np.full(len(rows), 1 / len(rows)), rtol=1e-5)


def test_t15_constant_divides_by_the_cap_and_never_by_the_longest_row() -> None:
    short = row_weights("constant", torch.tensor([3, 5]), 8, 2, 64)
    long = row_weights("constant", torch.tensor([3, 60]), 63, 2, 64)
    assert torch.equal(short, long)
    np.testing.assert_allclose(short.numpy(), 1 / (2 * 64))
