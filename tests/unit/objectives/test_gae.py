"""Advantages of tokens against the sums of the paper (arXiv 1506.02438), written out in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.objectives.advantages import generalized_advantages, token_rewards

SHARE = st.floats(0, 1)


def by_the_paper(rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float) -> np.ndarray:
    """Eq. 16 with the residuals of section 3, an infinite sum that ends with the episode."""
    tokens = len(rewards)
    ahead = np.append(values, 0.0)
    delta = [rewards[t] + gamma * ahead[t + 1] - ahead[t] for t in range(tokens)]
    weight = gamma * gae_lambda
    return np.array([sum(weight**step * delta[t + step] for step in range(tokens - t)) for t in range(tokens)])


def by_its_definition(rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float) -> np.ndarray:
    """(1 - lambda) (A1 + lambda A2 + ...), the mean of the k-step estimators; those beyond the end are all the same."""
    tokens, ahead = len(rewards), np.append(values, 0.0)

    def estimator(t: int, k: int) -> float:
        k = min(k, tokens - t)
        return -values[t] + sum(gamma**s * rewards[t + s] for s in range(k)) + gamma**k * ahead[t + k]

    many = 4000
    weights = (1 - gae_lambda) * gae_lambda ** np.arange(many)
    return np.array([sum(weights[k] * estimator(t, k + 1) for k in range(many)) for t in range(tokens)])


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=12), SHARE, SHARE)
def test_it_is_the_sum_of_the_paper(pairs: list[tuple[float, float]], gamma: float, gae_lambda: float) -> None:
    rewards, values = np.array(pairs).T
    found = generalized_advantages(rewards, values, gamma, gae_lambda)
    np.testing.assert_allclose(found, by_the_paper(rewards, values, gamma, gae_lambda), atol=1e-11)


def test_it_is_the_mean_of_the_k_step_estimators() -> None:
    draw = np.random.default_rng(0)
    rewards, values = draw.normal(size=6), draw.normal(size=6)
    found = generalized_advantages(rewards, values, 0.9, 0.95)
    np.testing.assert_allclose(found, by_its_definition(rewards, values, 0.9, 0.95), atol=1e-9)


def test_with_lambda_1_it_is_the_return_less_the_value_and_with_0_the_residual() -> None:
    draw = np.random.default_rng(1)
    rewards, values = draw.normal(size=9), draw.normal(size=9)
    to_go = np.cumsum(rewards[::-1])[::-1]
    np.testing.assert_allclose(generalized_advantages(rewards, values, 1.0, 1.0), to_go - values, atol=1e-12)
    residual = rewards + 0.7 * np.append(values[1:], 0.0) - values
    np.testing.assert_allclose(generalized_advantages(rewards, values, 0.7, 0.0), residual, atol=1e-12)


def test_exact_values_leave_no_advantage() -> None:
    rewards = np.random.default_rng(2).normal(size=7)
    to_go = np.cumsum(rewards[::-1])[::-1]
    np.testing.assert_allclose(generalized_advantages(rewards, to_go, 1.0, 0.3), np.zeros(7), atol=1e-12)


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_the_reward_comes_with_the_last_token_and_the_kl_with_each(coefficient: float) -> None:
    kl = np.array([0.1, -0.2, 0.3])
    found = token_rewards(2.0, 3, kl, coefficient)
    np.testing.assert_allclose(found, -coefficient * kl + np.array([0.0, 0.0, 2.0]))
    np.testing.assert_array_equal(kl, [0.1, -0.2, 0.3])
    np.testing.assert_array_equal(token_rewards(2.0, 3), [0.0, 0.0, 2.0])
    np.testing.assert_array_equal(token_rewards(-1.0, 1), [-1.0])
