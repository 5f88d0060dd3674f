"""Advantages of transitions: those of one episode, cut where an episode ends, with the value behind a time limit."""

import numpy as np
import pytest

from asyncrl.objectives.advantages import generalized_advantages
from asyncrl.objectives.trajectory_advantages import trajectory_advantages

GAMMA, LAMBDA = 0.9, 0.8


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
