from collections.abc import Callable
from functools import partial
from itertools import chain, combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.objectives.advantages import (
    Multiplier,
    RewardedCut,
    batch_advantages,
    batch_normalized,
    constrained_advantages,
    greedy_baseline,
    group_advantages,
    group_baseline,
    leave_one_out_advantages,
    shuffled,
)
from asyncrl.objectives.pass_at_k import pass_at_k, rate_over

rewards = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=16)


@given(rewards)
def test_an_advantage_is_the_reward_over_the_mean(values: list[float]) -> None:
    advantages = group_advantages(np.array(values))
    assert advantages.dtype == np.float64
    assert advantages == pytest.approx(np.array(values) - np.mean(values), abs=1e-12)


@pytest.mark.parametrize("normalize_std", [False, True])
@pytest.mark.trap("equal_rewards")
def test_equal_rewards_give_exactly_nothing(normalize_std: bool) -> None:
    # 0.3 eight times has a float mean that is not 0.3: without the rule the rounding error would be the signal
    assert not group_advantages(np.full(8, 0.3), normalize_std=normalize_std).any()
    assert not group_advantages(np.full(3, 0.1), normalize_std=normalize_std).any()


@pytest.mark.trap("equal_rewards")
def test_equal_rewards_give_exactly_nothing_whatever_they_are_compared_with() -> None:
    assert not leave_one_out_advantages(np.full(7, 0.3)).any()
    assert not batch_advantages(np.full(7, 0.3), np.arange(1.0, 8)).any()


@given(rewards)
def test_leave_one_out_is_the_reward_over_the_mean_of_the_others(values: list[float]) -> None:
    others = [np.mean(values[:i] + values[i + 1 :]) for i in range(len(values))]
    assert leave_one_out_advantages(np.array(values)) == pytest.approx(np.array(values) - others, abs=1e-11)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=16), st.floats(-100, 100))
def test_with_a_greedy_answer_an_advantage_is_the_reward_over_its_reward(values: list[float], greedy: float) -> None:
    """ReMax, arXiv 2310.10505, algorithm 1: the others of the group change nothing."""
    members = tuple(range(0, len(values), 2))
    (found,) = greedy_baseline([RewardedCut(0, members, dict(enumerate(values)), greedy=greedy)], 0)
    assert found == [np.float64(values[member]) - np.float64(greedy) for member in members]


@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(1, 30)), min_size=2, max_size=12))
def test_the_batch_is_normalized_over_its_tokens(pairs: list[tuple[float, int]]) -> None:
    values = np.array([value for value, _ in pairs])
    tokens = np.array([count for _, count in pairs])
    by_token = np.repeat(values, tokens)
    if values.max() == values.min():
        return
    expected = (values - by_token.mean()) / (by_token.std(ddof=1) + 1e-4)
    assert batch_advantages(values, tokens.astype(np.float64)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_what_is_left_out_of_the_loss_is_in_no_statistic_of_the_batch() -> None:
    values = np.array([1.0, 0.0, 0.5])
    tokens = np.array([3.0, 5.0, 0.0])
    found = batch_advantages(values, tokens)
    assert found[:2] == pytest.approx(batch_advantages(values[:2], tokens[:2]))
    assert np.isfinite(found).all()
    assert not batch_advantages(values, np.zeros(3)).any()
    assert not batch_advantages(values, np.array([1.0, 0.0, 0.0])).any(), "one token has no deviation"


def test_estimators_answer_for_the_members_of_each_cut() -> None:
    cuts = [
        RewardedCut(0, (0, 2), {0: 1.0, 1: 0.0, 2: 0.5}, {0: 2, 2: 3}),
        RewardedCut(1, (1,), {0: 1.0, 1: 0.0}, {1: 4}),
    ]
    assert group_baseline(cuts, 0, estimate=leave_one_out_advantages) == [[0.75, 0.0], [-1.0]]
    plain = batch_advantages(np.array([1.0, 0.5, 0.0]), np.array([2.0, 3.0, 4.0]))
    assert batch_normalized(cuts, 0) == [plain[:2].tolist(), plain[2:].tolist()]
    centred = batch_advantages(np.array([0.5, 0.0, -0.5]), np.array([2.0, 3.0, 4.0]))
    assert partial(batch_normalized, first=group_baseline)(cuts, 0) == [centred[:2].tolist(), centred[2:].tolist()]


@pytest.mark.trap("which_deviation")
def test_the_standard_deviation_is_that_of_a_sample() -> None:
    advantages = group_advantages(np.array([0.0, 1.0, 1.0, 0.0]), normalize_std=True)
    assert advantages == pytest.approx(np.array([-0.5, 0.5, 0.5, -0.5]) / (np.sqrt(1 / 3) + 1e-4))


@pytest.mark.parametrize("estimate", [group_advantages, leave_one_out_advantages])
@pytest.mark.parametrize("values", [[], [1.0], [1.0, float("nan")], [1.0, float("inf")]])
@pytest.mark.trap("group_of_one")
def test_what_is_no_group_is_refused(values: list[float], estimate: Callable) -> None:
    with pytest.raises(ValueError, match="at least two finite rewards"):
        estimate(np.array(values))


def test_a_cut_is_compared_with_all_rewards_of_its_group() -> None:
    cut = RewardedCut(5, (1, 3), {0: 0.0, 1: 1.0, 3: 0.5, 7: 0.5})
    assert group_baseline([cut], 0) == [[0.5, 0.0]]


def test_shuffling_moves_advantages_between_samples_and_changes_none() -> None:
    cuts = [RewardedCut(g, tuple(range(8)), {m: float(m * (g + 1)) for m in range(8)}) for g in range(4)]
    control = partial(shuffled, estimate=group_baseline, seed=3)
    plain = group_baseline(cuts, 7)
    mixed = control(cuts, 7)
    assert [len(members) for members in mixed] == [8] * 4
    assert sorted(chain.from_iterable(mixed)) == sorted(chain.from_iterable(plain))
    assert mixed != plain
    assert mixed == control(cuts, 7)
    assert mixed != control(cuts, 8)


# pass@k against all choices of k samples, and intervals against published values.
@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("passed", range(7))
def test_pass_at_k_is_the_share_of_choices_with_a_passing_sample(passed: int, k: int) -> None:
    samples = [number < passed for number in range(6)]
    assert pass_at_k(6, passed, k) == pytest.approx(fmean(any(chosen) for chosen in combinations(samples, k)))


@pytest.mark.parametrize(("passed", "low", "high"), [(0, 0, 0.2775), (1, 0.0179, 0.4042), (5, 0.2366, 0.7634)])
def test_intervals_of_ten_problems_are_wilson_s(passed: int, low: float, high: float) -> None:
    rate = rate_over([1.0] * passed + [0.0] * (10 - passed))
    assert rate == pytest.approx((passed / 10, low, high), abs=1e-4)


def test_an_interval_narrows_with_problems_and_stays_within_bounds() -> None:
    few = rate_over([1.0] * 10)
    many = rate_over([1.0] * 100)
    assert few.low < many.low < many.high == pytest.approx(few.high) == 1.0
    assert rate_over([0.5] * 4) == pytest.approx((0.5, 0.15004, 0.84996), abs=1e-4)


# Safe RLHF's formulas against the paper's, in float64.
def test_the_advantage_has_the_gradient_of_the_papers_objective() -> None:
    """theta moves along 1 / (1 + lambda) of the gradient of [J_R - lambda J_C]; before the clip each J has the gradient
    of E[ratio x A]."""
    draw = np.random.default_rng(1)
    reward = draw.normal(size=40)
    cost = draw.normal(size=40)
    for multiplier in (1e-9, 0.3, 1.0, 5.0):
        gradients = draw.normal(size=(40, 3))
        of_reward = (reward[:, None] * gradients).mean(0)
        of_cost = (cost[:, None] * gradients).mean(0)
        expected = (of_reward - multiplier * of_cost) / (1 + multiplier)
        found = (constrained_advantages(reward, cost, multiplier)[:, None] * gradients).mean(0)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_the_multiplier_climbs_in_its_logarithm() -> None:
    """ln lambda_(k+1) = ln lambda_k + alpha lambda_k J_C(theta_k), J_C the mean cost over the limit."""
    multiplier = Multiplier(0.7, 0.1, 0.25, 100.0)
    log = np.log(0.7)
    for cost in (0.9, 0.3, 0.25, 0.0, -2.0, 1.5):
        log += 0.1 * np.exp(log) * (cost - 0.25)
        multiplier.update(cost)
        assert multiplier.value == pytest.approx(np.exp(log), rel=1e-12)


def test_it_stays_over_0_and_under_its_bound_whatever_costs_are() -> None:
    multiplier = Multiplier(1.0, 0.5, 0.0, 5.0)
    for _ in range(50):
        multiplier.update(100.0)
        assert multiplier.value <= 5.0 * (1 + 1e-12)
    assert multiplier.value == pytest.approx(5.0)
    for _ in range(200):
        multiplier.update(-3.0)
        assert multiplier.value > 0
    assert multiplier.value < 0.1
    for cost in (-1e9, 0.5, 1e9):
        multiplier.update(cost)
        assert multiplier.value > 0
