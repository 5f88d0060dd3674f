from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.objectives.advantages import GroupBaseline, RewardedCut, Shuffled, group_advantages

rewards = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=16)


@given(rewards)
def test_an_advantage_is_the_reward_over_the_mean(values: list[float]) -> None:
    advantages = group_advantages(np.array(values))
    assert advantages.dtype == np.float64
    assert advantages == pytest.approx(np.array(values) - np.mean(values), abs=1e-12)


@pytest.mark.parametrize("normalize_std", [False, True])
def test_equal_rewards_give_exactly_nothing(normalize_std: bool) -> None:
    # 0.3 eight times has a float mean that is not 0.3: without the rule the rounding error would be the signal
    assert not group_advantages(np.full(8, 0.3), normalize_std=normalize_std).any()
    assert not group_advantages(np.full(3, 0.1), normalize_std=normalize_std).any()


def test_the_standard_deviation_is_that_of_a_sample() -> None:
    advantages = group_advantages(np.array([0.0, 1.0, 1.0, 0.0]), normalize_std=True)
    assert advantages == pytest.approx(np.array([-0.5, 0.5, 0.5, -0.5]) / (np.sqrt(1 / 3) + 1e-4))


@pytest.mark.parametrize("values", [[], [1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_what_is_no_group_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least two finite rewards"):
        group_advantages(np.array(values))


def test_a_cut_is_compared_with_all_rewards_of_its_group() -> None:
    cut = RewardedCut(5, (1, 3), {0: 0.0, 1: 1.0, 3: 0.5, 7: 0.5})
    assert GroupBaseline()([cut], 0) == [[0.5, 0.0]]


def test_shuffling_moves_advantages_between_samples_and_changes_none() -> None:
    cuts = [RewardedCut(g, tuple(range(8)), {m: float(m * (g + 1)) for m in range(8)}) for g in range(4)]
    control = Shuffled(GroupBaseline(), seed=3)
    plain, mixed = GroupBaseline()(cuts, 7), control(cuts, 7)
    assert [len(members) for members in mixed] == [8] * 4
    assert sorted(chain.from_iterable(mixed)) == sorted(chain.from_iterable(plain))
    assert mixed != plain
    assert mixed == control(cuts, 7)
    assert mixed != control(cuts, 8)
