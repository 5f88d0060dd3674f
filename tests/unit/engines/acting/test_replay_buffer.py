"""The replay: a bound, uniform and prioritised draws, and a state that goes on bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.engines.acting.sac_learner import ReplayBuffer, SumTree
from asyncrl.engines.acting.stepping.spaces import ActionSpace, Spaces
from asyncrl.engines.acting.transitions import TransitionRow

SPACES = Spaces(1, ActionSpace("box", 1, low=(-1.0,), high=(1.0,), shape=(1,)))


def row(values: list[float], version: int = 0, live: list[bool] | None = None) -> TransitionRow:
    """Transitions whose observation, action and reward is a number."""
    column = np.array(values, np.float32)
    no = np.zeros(len(values), np.bool_)
    count = len(values)
    return TransitionRow(
        (0, 0, 0),
        observations=column[:, None],
        actions=column[:, None],
        logprobs=column,
        rewards=column,
        next_observations=column[:, None] + 1,
        terminated=no,
        truncated=no,
        versions=np.full(count, version),
        returns=np.zeros(0, np.float32),
        lengths=np.zeros(0, np.int64),
        live=np.array(live if live is not None else [True] * count),
    )


def test_it_holds_the_newest_transitions_up_to_its_size() -> None:
    replay = ReplayBuffer(4, SPACES, seed=0)
    replay.add(row([0, 1, 2]))
    assert len(replay) == 3
    replay.add(row([3, 4, 5]))
    assert (len(replay), replay.added) == (4, 6)
    drawn = replay.draw(500)
    assert {*drawn.rewards.tolist()} == {2.0, 3.0, 4.0, 5.0}
    assert (drawn.next_observations - drawn.observations == 1).all()
    assert (drawn.weights == 1).all()


def test_a_row_longer_than_the_replay_leaves_its_end() -> None:
    replay = ReplayBuffer(3, SPACES, seed=0)
    replay.add(row([0, 1, 2, 3, 4]))
    assert {*replay.draw(200).rewards.tolist()} == {2.0, 3.0, 4.0}


def test_masked_transitions_do_not_enter() -> None:
    replay = ReplayBuffer(8, SPACES, seed=0)
    replay.add(row([0, 1, 2], live=[True, False, True]))
    assert {*replay.draw(100).rewards.tolist()} == {0.0, 2.0}


def test_a_bound_on_age_draws_younger_ones_while_there_are_any() -> None:
    replay = ReplayBuffer(8, SPACES, seed=0)
    replay.add(row([0, 1], version=1))
    replay.add(row([2, 3], version=5))
    assert {*replay.draw(100, oldest=4).rewards.tolist()} == {2.0, 3.0}
    assert {*replay.draw(100, oldest=1).rewards.tolist()} == {0.0, 1.0, 2.0, 3.0}
    assert len(replay.draw(10, oldest=9).rewards) == 10


def test_draws_by_priority_come_in_proportion_and_weights_correct_for_it() -> None:
    replay = ReplayBuffer(4, SPACES, seed=0, kind="prioritised", exponent=1.0, correction=1.0)
    replay.add(row([0, 1, 2, 3]))
    everything = replay.draw(4)
    assert everything.places.tolist() == [0, 1, 2, 3]
    replay.update(everything, np.array([1.0, 1.0, 2.0, 4.0]))
    drawn = replay.draw(8000)
    shares = np.bincount(drawn.rewards.long().numpy(), minlength=4) / 8000
    np.testing.assert_allclose(shares, [1 / 8, 1 / 8, 2 / 8, 4 / 8], atol=0.02)
    # Weighted, every transition counts the same.
    sums = np.bincount(drawn.rewards.long().numpy(), weights=drawn.weights.numpy(), minlength=4)
    np.testing.assert_allclose(sums / sums.mean(), np.ones(4), atol=0.08)
    assert drawn.weights.max() == 1


@pytest.mark.parametrize("old_first", [True, False])
@pytest.mark.parametrize("old_priority", [1e-3, 1.0, 50.0])
def test_a_bound_on_age_draws_and_weighs_as_if_older_ones_had_never_been(old_first: bool, old_priority: float) -> None:
    of_old = row([9, 9, 9], version=1)
    priorities = np.array([1.0, 2.0, 4.0, 8.0])
    young, both = (ReplayBuffer(8, SPACES, seed=3, kind="prioritised", correction=0.5) for _ in range(2))
    for replay in (young, both):
        for version, values in ((5, [0, 1]), (6, [2, 3])):
            if replay is both and old_first == (version == 5):
                both.add(of_old)
            replay.add(row(values, version=version))
        places = np.flatnonzero(replay._versions[: len(replay)] >= 5)
        everything = replay.draw(16)
        replay.update(replace(everything, places=places), priorities)
        if replay is both:
            both.update(replace(everything, places=np.flatnonzero(replay._versions[:7] == 1)), np.full(3, old_priority))
    first = young.draw(4000)
    second = both.draw(4000, oldest=5)
    assert torch.equal(first.rewards, second.rewards)
    torch.testing.assert_close(first.weights, second.weights)
    shares = np.bincount(second.rewards.long().numpy(), minlength=4) / 4000
    np.testing.assert_allclose(shares, priorities**0.6 / (priorities**0.6).sum(), atol=0.001)
    np.testing.assert_allclose(
        [second.weights[second.rewards == each][0] for each in range(4)], priorities**-0.3, rtol=1e-4
    )
    assert len(both.draw(10, oldest=9).rewards) == 10, "all are too old, so any is drawn"


def test_new_transitions_have_the_largest_priority_so_far() -> None:
    replay = ReplayBuffer(8, SPACES, seed=0, kind="prioritised", exponent=1.0)
    replay.add(row([0, 1]))
    replay.update(replay.draw(2), np.array([9.0, 9.0]))
    replay.add(row([2]))
    assert (replay.draw(3000).rewards == 2).float().mean() == pytest.approx(1 / 3, abs=0.03)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 1000])
def test_a_sum_tree_finds_the_place_where_the_running_sum_passes(size: int) -> None:
    draw = np.random.default_rng(size)
    priorities = draw.random(size)
    tree = SumTree(size)
    tree.set(np.arange(size), priorities)
    assert tree.total == pytest.approx(priorities.sum())
    points = draw.random(200) * tree.total * 0.999
    expected = np.searchsorted(np.cumsum(priorities), points, side="right")
    np.testing.assert_array_equal(tree.find(points), expected)
    changed = draw.integers(size, size=min(size, 3))
    tree.set(np.unique(changed), np.zeros(len(np.unique(changed))))
    priorities[changed] = 0
    assert tree.total == pytest.approx(priorities.sum())


@pytest.mark.parametrize("kind", ["uniform", "prioritised"])
def test_a_restored_replay_draws_the_same(kind: str) -> None:
    one, two = (ReplayBuffer(4, SPACES, seed=seed, kind=kind) for seed in (1, 2))
    one.add(row([0, 1, 2, 3, 4], version=3))
    drawn = one.draw(3)
    if kind == "prioritised":
        one.update(drawn, np.array([1.0, 5.0, 2.0]))
    two.restore(one.state())
    assert (two.added, len(two)) == (5, 4)
    for _ in range(3):
        first = one.draw(16)
        second = two.draw(16)
        np.testing.assert_array_equal(first.places, second.places)
        assert (first.rewards == second.rewards).all()
        assert (first.weights == second.weights).all()
        np.testing.assert_array_equal(first.versions, second.versions)
