"""The critic's loss against its formula in numpy, and its gradient against finite differences."""

import numpy as np
import pytest
import torch

from asyncrl.objectives.value_loss import Moments, explained_variance, value_loss


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
