"""Advantages of turns: rewards from a turn on, compared with the same turn of the other samples of the group."""

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
    turn_advantages,
)

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
    cut, estimate = cut_of([(value,) for value in values]), partial(group_advantages, normalize_std=std)
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
