"""Advantages of tokens against the sums of the paper (arXiv 1506.02438), written out in float64."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.objectives.advantages import (
    RewardedCut,
    generalized_advantages,
    group_advantages,
    group_baseline,
    group_estimate,
    leave_one_out_advantages,
    rewards_to_go,
    token_rewards,
    trajectory_advantages,
    turn_advantages,
)

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
    tokens = len(rewards)
    ahead = np.append(values, 0.0)

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
    rewards = draw.normal(size=6)
    values = draw.normal(size=6)
    found = generalized_advantages(rewards, values, 0.9, 0.95)
    np.testing.assert_allclose(found, by_its_definition(rewards, values, 0.9, 0.95), atol=1e-9)


def test_with_lambda_1_it_is_the_return_less_the_value_and_with_0_the_residual() -> None:
    draw = np.random.default_rng(1)
    rewards = draw.normal(size=9)
    values = draw.normal(size=9)
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


# Advantages of transitions: those of one episode, cut where an episode ends, with the value behind a time limit.
GAMMA = 0.9
LAMBDA = 0.8


def numbers(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=count), draw.normal(size=count), draw.normal(size=count)


def advantages(rewards: np.ndarray, values: np.ndarray, following: np.ndarray, ends: dict[int, str]) -> np.ndarray:
    terminated = np.array([ends.get(step) == "terminated" for step in range(len(rewards))])
    ended = np.array([step in ends for step in range(len(rewards))])
    return trajectory_advantages(rewards, values, following, terminated, ended, GAMMA, LAMBDA)


def test_one_whole_episode_has_the_advantages_of_an_answer() -> None:
    rewards, values, _ = numbers(7)
    found = advantages(rewards, values, np.append(values[1:], 123.0), {6: "terminated"})
    np.testing.assert_allclose(found, generalized_advantages(rewards, values, GAMMA, LAMBDA), atol=1e-12)


def test_with_lambda_1_it_is_the_discounted_return_minus_the_value() -> None:
    rewards, values, _ = numbers(5)
    following = np.append(values[1:], 2.0)
    no = np.zeros(5, np.bool_)
    found = trajectory_advantages(rewards, values, following, no, no, GAMMA, 1.0)
    returns = sum(GAMMA**step * reward for step, reward in enumerate(rewards)) + GAMMA**5 * 2.0
    assert found[0] == pytest.approx(returns - values[0])


@pytest.mark.parametrize(("end", "bootstrap"), [("terminated", 0.0), ("truncated", 1.0)])
def test_an_end_cuts_the_sum_and_a_limit_keeps_the_value_behind_it(end: str, bootstrap: float) -> None:
    rewards, values, following = numbers(6, seed=1)
    found = advantages(rewards, values, following, {2: end})
    assert found[2] == pytest.approx(rewards[2] + GAMMA * bootstrap * following[2] - values[2])
    alone = advantages(rewards[3:], values[3:], following[3:], {})
    np.testing.assert_allclose(found[3:], alone, atol=1e-12)
    delta = rewards[1] + GAMMA * following[1] - values[1]
    assert found[1] == pytest.approx(delta + GAMMA * LAMBDA * found[2])


# Advantages of turns: rewards from a turn on, compared with the same turn of the other samples of the group.
NUMBERS = st.floats(-10, 10)
MEAN = group_estimate("group_mean", normalize_std=False)


def cut_of(turns: list[tuple[float, ...]], members: tuple[int, ...] | None = None) -> RewardedCut:
    """A group whose rewards are the sums of these turns; a sample of one turn has no parts."""
    parts = {member: own for member, own in enumerate(turns) if len(own) > 1}
    return RewardedCut(0, members or tuple(range(len(turns))), dict(enumerate(map(sum, turns))), turns=parts)


def test_each_turn_is_compared_with_the_samples_that_have_it() -> None:
    """Worked by hand: rewards to go, discounted by a half, are (2, 2), (3, 4, 2) and (4)."""
    cut = cut_of([(1.0, 2.0), (1.0, 3.0, 2.0), (4.0,)])
    assert [rewards_to_go(cut.by_turn(member), 0.5) for member in range(3)] == [[2, 2], [3, 4, 2], [4]]
    (found,) = turn_advantages([cut], MEAN, 0.5)
    assert found == [(-1, -1), (0, 1, 0), (1,)]
    (found,) = turn_advantages([cut], leave_one_out_advantages, 0.5)
    assert found == [(-1.5, -2), (0, 2, 0), (1.5,)]


def test_a_turn_that_no_other_sample_has_is_compared_with_nothing() -> None:
    (found,) = turn_advantages([cut_of([(0.0, 0.0, 9.0), (0.0,)])], MEAN, 1.0)
    assert found == [(4.5, 0, 0), (-4.5,)]


def test_samples_that_are_not_in_the_batch_stay_in_the_baseline() -> None:
    cut = cut_of([(0.0, 1.0), (0.0, 3.0), (0.0, 5.0)], members=(0, 2))
    assert turn_advantages([cut], MEAN, 1.0) == [[(-2, -2), (2, 2)]]


@given(st.lists(NUMBERS, min_size=2, max_size=8), st.booleans(), NUMBERS.map(abs).map(lambda each: each / 10))
def test_samples_of_one_turn_have_the_advantages_of_answers(values: list[float], std: bool, discount: float) -> None:
    cut = cut_of([(value,) for value in values])
    estimate = partial(group_advantages, normalize_std=std)
    (found,) = turn_advantages([cut], estimate, discount)
    assert [[own[0] for own in found]] == group_baseline([cut], 0, estimate=estimate)
    assert {len(own) for own in found} == {1}


@given(st.lists(NUMBERS, min_size=2, max_size=8), st.integers(2, 5))
def test_without_a_discount_rewards_at_the_end_credit_all_turns_alike(values: list[float], turns: int) -> None:
    cut = cut_of([(0.0,) * (turns - 1) + (value,) for value in values])
    (found,) = turn_advantages([cut], MEAN, 1.0)
    assert [[own] * turns for own in group_baseline([cut], 0)[0]] == [list(own) for own in found]


@given(st.lists(NUMBERS, min_size=1, max_size=12), NUMBERS)
def test_rewards_on_the_way_add_up_to_the_reward(along: list[float], reward: float) -> None:
    kl = np.linspace(-1, 1, len(along))
    found = token_rewards(reward, len(along), kl, 0.5, np.array(along))
    assert found.sum() == pytest.approx(reward - 0.5 * kl.sum(), abs=1e-9)
    assert found[:-1] == pytest.approx(np.array(along[:-1]) - 0.5 * kl[:-1], abs=1e-12)
    to_go = generalized_advantages(found, np.zeros(len(along)), 1.0, 1.0)
    assert to_go == pytest.approx(rewards_to_go(found.tolist(), 1.0), abs=1e-9)
