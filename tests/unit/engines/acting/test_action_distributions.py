"""Distributions of actions against those of torch, closed forms and sums over many samples."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import AffineTransform, Categorical, Normal, TanhTransform, TransformedDistribution

from asyncrl.engines.acting.networks import (
    LEAST_LOG_STD,
    MOST_LOG_STD,
    CategoricalActions,
    SquashedGaussian,
    half_widths,
    log_slope,
    performed,
)
from asyncrl.engines.acting.stepping.spaces import ActionSpace

BOX = ActionSpace("box", 2, low=(-2.0, 0.0), high=(2.0, 1.0), shape=(2,))


def gaussian(mean: list[float], std: list[float], count: int = 1) -> SquashedGaussian:
    return SquashedGaussian(
        torch.tensor([mean] * count), torch.tensor([std] * count).log(), half_widths(BOX) if len(mean) == 2 else 0.0
    )


def of_torch(mean: list[float], std: list[float]) -> TransformedDistribution:
    low = torch.tensor(BOX.low)
    high = torch.tensor(BOX.high)
    box = AffineTransform((low + high) / 2, (high - low) / 2)
    return TransformedDistribution(Normal(torch.tensor(mean), torch.tensor(std)), [TanhTransform(), box])


def test_categorical_logprobs_and_entropies_are_those_of_torch() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    own = CategoricalActions(logits)
    other = Categorical(logits=logits)
    actions = torch.tensor([[0.0], [1.0], [2.0], [3.0], [1.0]])
    torch.testing.assert_close(own.logprobs(actions), other.log_prob(actions.squeeze(-1)))
    torch.testing.assert_close(own.entropy(), other.entropy())
    assert own.mode().squeeze(-1).tolist() == logits.argmax(-1).tolist()


def test_categorical_samples_come_as_often_as_they_are_likely() -> None:
    chances = torch.tensor([0.1, 0.2, 0.7])
    drawn = CategoricalActions(chances.log().expand(20_000, -1)).sample(torch.Generator().manual_seed(1))
    shares = np.bincount(drawn.squeeze(-1).long().numpy(), minlength=3) / 20_000
    np.testing.assert_allclose(shares, chances.numpy(), atol=0.02)


def test_squashed_logprobs_are_those_of_torch_in_the_box() -> None:
    mean = [0.3, -0.8]
    std = [0.5, 1.5]
    stored = torch.randn(50, 2, generator=torch.Generator().manual_seed(2))
    actions = torch.from_numpy(performed(stored, BOX))
    expected = of_torch(mean, std).log_prob(actions).sum(-1)
    torch.testing.assert_close(gaussian(mean, std, 50).logprobs(stored), expected, atol=2e-3, rtol=1e-4)


def test_logprobs_stay_finite_where_tanh_rounds_to_1() -> None:
    far = torch.tensor([[30.0, -30.0]])
    assert torch.isfinite(gaussian([30.0, -30.0], [1.0, 1.0]).logprobs(far)).all()
    assert log_slope(torch.tensor(30.0)).item() == pytest.approx(math.log(4) - 60, abs=1e-4)


@pytest.mark.parametrize("std", [math.exp(LEAST_LOG_STD), 0.05, 0.5, 1.0, 2.0, math.e, 5.0, math.exp(MOST_LOG_STD)])
@pytest.mark.parametrize("mean", [0.0, 0.7, -2.0, 6.0])
def test_the_entropy_of_a_squashed_gaussian_is_its_integral(mean: float, std: float) -> None:
    grid = np.linspace(mean - 12 * std, mean + 12 * std, 200_001)
    density = np.exp(-0.5 * ((grid - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
    slope = 2 * (math.log(2) - grid - np.logaddexp(0, -2 * grid))
    integral = 0.5 + 0.5 * math.log(2 * math.pi) + math.log(std) + float(np.trapezoid(density * slope, grid))
    log_std = torch.tensor([[math.log(std)]], dtype=torch.float64, requires_grad=True)
    entropy = SquashedGaussian(torch.tensor([[mean]], dtype=torch.float64), log_std).entropy()
    assert entropy.item() == pytest.approx(integral, abs=1e-5)
    gradient = 1 + float(np.trapezoid(density * -2 * np.tanh(grid) * (grid - mean), grid))
    assert torch.autograd.grad(entropy.sum(), log_std)[0].item() == pytest.approx(gradient, abs=1e-4)
    rounded = SquashedGaussian(torch.tensor([[mean]]), log_std.detach().float()).entropy()
    assert rounded.item() == pytest.approx(integral, abs=2e-5)


def test_the_entropy_is_the_mean_of_minus_the_logprobs_of_samples() -> None:
    own = gaussian([0.4, -0.3], [0.6, 0.9], 40_000)
    stored = own.sample(torch.Generator().manual_seed(3))
    assert -own.logprobs(stored).mean().item() == pytest.approx(own.entropy()[0].item(), abs=0.02)


def test_samples_have_the_moments_of_their_gaussian_and_actions_stay_in_the_box() -> None:
    stored = gaussian([0.4, -5.0], [0.5, 3.0], 20_000).sample(torch.Generator().manual_seed(4))
    torch.testing.assert_close(stored.mean(0), torch.tensor([0.4, -5.0]), atol=0.08, rtol=0)
    torch.testing.assert_close(stored.std(0), torch.tensor([0.5, 3.0]), atol=0.08, rtol=0)
    actions = performed(stored, BOX)
    assert (actions >= np.array(BOX.low)).all()
    assert (actions <= np.array(BOX.high)).all()


def test_gradients_reach_mean_and_deviation_through_samples() -> None:
    mean = torch.zeros(1, 2, requires_grad=True)
    log_std = torch.zeros(1, 2, requires_grad=True)
    own = SquashedGaussian(mean, log_std)
    torch.manual_seed(0)
    own.with_gradient().sum().backward()
    torch.testing.assert_close(mean.grad, torch.ones(1, 2))
    assert log_std.grad is not None
    assert log_std.grad.abs().min() > 0
    assert not own.sample().requires_grad


def test_discrete_actions_begin_at_the_start_of_their_space() -> None:
    space = ActionSpace("discrete", 3, start=-1)
    assert performed(torch.tensor([[0.0], [2.0]]), space).tolist() == [[-1.0], [1.0]]
