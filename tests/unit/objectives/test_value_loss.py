"""The critic's loss against its formula in numpy, and its gradient against finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.objectives.losses import (
    Aggregation,
    Moments,
    actor_loss,
    bradley_terry_loss,
    critics_loss,
    explained_variance,
    move_towards,
    row_weights,
    soft_targets,
    temperature_loss,
    value_loss,
)


def tokens(seed: int, count: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    judged = draw.normal(size=count)
    return judged + draw.normal(0, 0.3, count), judged, draw.normal(size=count)


def by_the_field(values: np.ndarray, judged: np.ndarray, returns: np.ndarray, clip: float) -> np.ndarray:
    """As ppo2 of OpenAI's baselines, TRL and verl have it; each token's part of the sum."""
    clipped = judged + np.clip(values - judged, -clip, clip)
    return 0.5 * np.maximum((values - returns) ** 2, (clipped - returns) ** 2)


@pytest.mark.parametrize("clip", [0.2, 0.01, 10.0])
def test_it_is_the_larger_of_two_squared_errors(clip: float) -> None:
    values, judged, returns = tokens(0)
    terms, clipped = value_loss(torch.tensor(values), torch.tensor(judged), torch.tensor(returns), clip)
    np.testing.assert_allclose(terms.numpy(), by_the_field(values, judged, returns, clip), atol=1e-15)
    plain = (values - returns) ** 2 / 2
    np.testing.assert_array_equal(clipped.numpy(), terms.numpy() > plain)
    assert clipped.any() == (clip < 1)


def test_without_a_clip_it_is_the_squared_error_of_the_paper() -> None:
    values, judged, returns = tokens(1)
    terms, clipped = value_loss(torch.tensor(values), torch.tensor(judged), torch.tensor(returns), 0.0)
    np.testing.assert_allclose(terms.numpy(), (values - returns) ** 2 / 2, atol=1e-15)
    assert not clipped.any()


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_its_gradient_is_that_of_finite_differences_and_none_where_it_is_held(clip: float) -> None:
    values, judged, returns = tokens(2)
    leaf = torch.tensor(values, requires_grad=True)
    terms, clipped = value_loss(leaf, torch.tensor(judged), torch.tensor(returns), clip)
    (gradient,) = torch.autograd.grad(terms.sum(), leaf)
    step = 1e-6

    def at(shift: float) -> np.ndarray:
        return value_loss(torch.tensor(values + shift), torch.tensor(judged), torch.tensor(returns), clip)[0].numpy()

    np.testing.assert_allclose(gradient.numpy(), (at(step) - at(-step)) / (2 * step), atol=1e-5)
    assert (gradient[clipped] == 0).all()
    assert clipped.any() == (clip > 0)


def test_explained_variance_is_1_for_exact_values_and_0_for_constant_ones() -> None:
    returns = np.random.default_rng(3).normal(2, 1.5, 500)

    def moments(values: np.ndarray) -> Moments:
        return len(values), values.sum(), (values**2).sum()

    def explained(values: np.ndarray) -> float:
        return explained_variance(moments(returns), moments(returns - values))

    assert explained(returns) == pytest.approx(1)
    assert explained(np.full(500, 9.0)) == pytest.approx(0, abs=1e-9)
    noisy = returns + np.random.default_rng(4).normal(0, 1, 500)
    assert explained(noisy) == pytest.approx(1 - np.var(returns - noisy) / np.var(returns))
    same = np.full(500, 3.0)
    assert explained_variance(moments(same), moments(same - noisy)) == 0


# The loss of Bradley and Terry against its formula.
def test_the_loss_is_minus_the_log_probability_of_what_was_picked() -> None:
    better = torch.tensor([1.0, -2.0, 0.5])
    other = torch.tensor([0.0, 1.0, 0.5])
    chances = [1 / (1 + math.exp(-difference)) for difference in (1.0, -3.0, 0.0)]
    wins = torch.tensor([1.0, 1.0, 0.5])
    expected = [-math.log(chances[0]), -math.log(chances[1]), math.log(2)]
    assert bradley_terry_loss(better, other, wins).tolist() == pytest.approx(expected)


def test_the_gradient_is_the_error_of_the_probability() -> None:
    better = torch.tensor([0.3], requires_grad=True)
    other = torch.tensor([-0.4], requires_grad=True)
    torch.autograd.backward(bradley_terry_loss(better, other, torch.tensor([1.0])).sum())
    assert better.grad is not None
    assert other.grad is not None
    assert better.grad.item() == pytest.approx(-(1 - torch.sigmoid(torch.tensor(0.7)).item()))
    assert other.grad.item() == -better.grad.item()


def test_far_scores_stay_finite() -> None:
    loss = bradley_terry_loss(torch.tensor([-500.0]), torch.tensor([500.0]), torch.tensor([1.0]))
    assert loss.item() == 1000.0


# The losses of SAC against closed forms, and where their gradients go.
def test_a_target_is_the_reward_and_the_soft_value_of_the_next_state() -> None:
    rewards = torch.tensor([1.0, 2.0, 3.0])
    terminated = torch.tensor([0.0, 1.0, 0.0])
    values = torch.tensor([10.0, 20.0, 30.0], requires_grad=True)
    logprobs = torch.tensor([-1.0, -1.0, 2.0])
    targets = soft_targets(rewards, terminated, values, logprobs, torch.tensor(0.5), 0.9)
    torch.testing.assert_close(targets, torch.tensor([1 + 0.9 * 10.5, 2.0, 3 + 0.9 * 29.0]))
    assert not targets.requires_grad


def test_the_loss_of_the_critics_is_half_the_weighted_square_error_of_both() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    loss = critics_loss(values, torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.5]))
    assert loss.item() == pytest.approx((1 / 2 + 0) / 2 + (9 / 2 + 0.5 * 9 / 2) / 2)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, torch.tensor([[0.5, 0.0], [1.5, 0.75]]))


def test_the_actor_gains_value_and_entropy() -> None:
    logprobs = torch.tensor([1.0, -1.0], requires_grad=True)
    values = torch.tensor([2.0, 4.0], requires_grad=True)
    temperature = torch.tensor(0.2, requires_grad=True)
    loss = actor_loss(logprobs, values, temperature)
    assert loss.item() == pytest.approx(((0.2 - 2) + (-0.2 - 4)) / 2)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.1, 0.1]))
    torch.testing.assert_close(values.grad, torch.tensor([-0.5, -0.5]))
    assert temperature.grad is None


@pytest.mark.parametrize(("entropy", "rises"), [(0.5, True), (2.0, False)])
def test_the_temperature_rises_while_the_entropy_is_below_its_target(entropy: float, rises: bool) -> None:
    log_temperature = torch.tensor(0.3, requires_grad=True)
    loss = temperature_loss(log_temperature, torch.full((4,), -entropy), target_entropy=1.0)
    loss.backward()
    assert log_temperature.grad is not None
    assert log_temperature.grad.item() == pytest.approx(-torch.tensor(0.3).exp().item() * (1.0 - entropy))
    assert (log_temperature.grad.item() < 0) == rises


def test_targets_move_a_share_of_the_way_in_place() -> None:
    target = torch.tensor([1.0, 2.0])
    source = torch.tensor([3.0, 2.0])
    move_towards([target], [source], 0.25)
    torch.testing.assert_close(target, torch.tensor([1.5, 2.0]))


# The ways to average against their sums in float64, and that masking a token changes no other's weight.
lengths = st.lists(st.integers(1, 50), min_size=1, max_size=20)


def average(aggregation: str, rows: list[np.ndarray], divisor: int) -> float:
    """Computes the loss from the terms of the rows, as the papers write it."""
    match aggregation:
        case "token_mean":
            return np.concatenate(rows).mean()
        case "sequence_mean_token_sum":
            return float(np.mean([row.sum() for row in rows]))
        case "sequence_mean_token_mean":
            return float(np.mean([row.mean() for row in rows]))
        case _:
            return float(np.mean([row.sum() / divisor for row in rows]))


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"]
)
@given(lengths, st.integers(0, 1000))
def test_weighted_terms_add_up_to_the_average(aggregation: Aggregation, sizes: list[int], seed: int) -> None:
    rows = [np.random.default_rng([seed, index]).normal(size=size) for index, size in enumerate(sizes)]
    weights = row_weights(aggregation, torch.tensor(sizes), sum(sizes), len(sizes), 64).double().numpy()
    total = sum(weight * row.sum() for weight, row in zip(weights, rows, strict=True))
    np.testing.assert_allclose(total, average(aggregation, rows, 64), rtol=1e-5, atol=1e-6)


@pytest.mark.trap("batch_length_divisor")
def test_constant_divides_by_the_cap_and_never_by_the_longest_row() -> None:
    short = row_weights("constant", torch.tensor([3, 5]), 8, 2, 64)
    long = row_weights("constant", torch.tensor([3, 60]), 63, 2, 64)
    assert torch.equal(short, long)
    np.testing.assert_allclose(short.numpy(), 1 / (2 * 64))
