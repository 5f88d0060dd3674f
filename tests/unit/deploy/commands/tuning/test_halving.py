"""Sequential halving: steps of each rung, scores, comparisons in pairs, and who goes on."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.deploy.commands.tuning.halving import PairedDifference, Rung, paired, rungs, score


def test_rungs_keep_one_in_three_and_end_with_all_steps() -> None:
    assert rungs(9, 3, 250) == [Rung(28, 9), Rung(84, 3), Rung(250, 1)]
    assert rungs(4, 2, 16) == [Rung(4, 4), Rung(8, 2), Rung(16, 1)]
    assert rungs(2, 3, 10) == [Rung(10, 2)]


@given(st.integers(1, 200), st.integers(2, 9), st.integers(1, 10_000))
def test_rungs_get_longer_with_fewer_candidates(candidates: int, keep: int, steps: int) -> None:
    found = rungs(candidates, keep, steps)
    assert found[0].candidates == candidates
    assert found[-1].steps == steps
    assert found[-1].candidates < keep
    for before, after in pairwise(found):
        assert before.steps <= after.steps
        assert after.candidates == before.candidates // keep


def lines(*rewards: float | None) -> list[dict[str, float | None]]:
    return [{"step": number, "reward/mean": reward} for number, reward in enumerate(rewards, 1)]


def test_a_score_is_the_mean_of_the_last_fourth() -> None:
    assert score(lines(0, 0, 0, 0, 0, 0, 0.25, 0.75), "reward/mean", 8) == 0.5
    assert score(lines(0, 0, 1, 0.5), "reward/mean", 3) == 1
    assert score(lines(1), "reward/mean", 1) == 1


@pytest.mark.parametrize("rewards", [(), (1.0,), (1.0, None), (1.0, math.nan), (1.0, math.inf)])
def test_there_is_no_score_without_finite_numbers_of_all_steps(rewards: tuple[float | None, ...]) -> None:
    assert score(lines(*rewards), "reward/mean", 2) is None
    assert score(lines(1, 1), "critic/loss", 2) is None


def test_differences_are_those_of_each_seed() -> None:
    found = paired({0: 0.5, 1: 0.9}, {0: 0.4, 1: 0.8, 2: 0.1})
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert found.error == pytest.approx(0, abs=1e-12)
    assert found.is_clear
    less = paired({0: 0.5, 1: 0.9}, {0: 0.4, 1: 0.6}, sign=-1)
    assert less is not None
    assert less.mean == pytest.approx(-0.2)
    assert less.error == pytest.approx(0.1)
    assert str(less) == "-0.2 ± 0.1"
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_one_seed_is_never_clear() -> None:
    found = paired({0: 0.5}, {0: 0.0})
    assert found == PairedDifference(0.5, None)
    assert not found.is_clear
    assert not PairedDifference(0.2, 0.1).is_clear
