"""M2PO's bound against its definition: the largest squares go until the mean of the rest is within the budget."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.objectives.losses import pushed_away, second_moment_bound


def alone(values: torch.Tensor) -> torch.Tensor:
    return values


def kept_by_definition(squares: np.ndarray, budget: float) -> int:
    rest = np.sort(squares)
    while len(rest) and rest.mean() > budget:
        rest = rest[:-1]
    return len(rest)


@given(st.lists(st.floats(1e-6, 4), max_size=40, unique=True), st.floats(0.001, 1))
def test_the_largest_go_until_the_mean_of_the_rest_fits(values: list[float], budget: float) -> None:
    squares = np.array(values)
    bound = second_moment_bound(torch.tensor(squares, dtype=torch.float64), budget, alone, alone)
    assert int((squares <= bound).sum()) == kept_by_definition(squares, budget)


def test_all_are_kept_when_they_fit() -> None:
    assert second_moment_bound(torch.tensor([0.01, 0.02]).double(), 0.04, alone, alone) == float("inf")
    assert second_moment_bound(torch.zeros(0).double(), 0.04, alone, alone) == float("inf")


def test_equal_squares_over_the_budget_all_go() -> None:
    bound = second_moment_bound(torch.full((4,), 0.5).double(), 0.04, alone, alone)
    assert bound < 0.5


def test_ranks_find_the_bound_of_all_their_tokens() -> None:
    """Two ranks in lock step: each sum and maximum is that of both, as with one rank that holds all tokens."""
    draw = np.random.default_rng(2)
    parts = [torch.tensor(draw.exponential(0.1, size), dtype=torch.float64) for size in (30, 11)]
    whole = second_moment_bound(torch.cat(parts), 0.04, alone, alone)
    bounds: list[float] = []

    def other(values: torch.Tensor, bound: float) -> torch.Tensor:
        kept = parts[1][parts[1] <= bound]
        return values + torch.tensor([float(kept.sum()), float(len(kept))], dtype=torch.float64)

    # The second rank's share of a sum is a function of the bound that both ask about: recover it by halving alike.
    low = 0.0
    high = max(float(part.max()) for part in parts)
    asked = iter([high])

    def total(values: torch.Tensor) -> torch.Tensor:
        nonlocal low, high, asked
        bound = next(asked, (low + high) / 2)
        added = other(values, bound)
        if bounds:
            fits = bool(added[0] <= 0.04 * added[1])
            low, high = (bound, high) if fits else (low, bound)
        bounds.append(bound)
        return added

    def largest(values: torch.Tensor) -> torch.Tensor:
        if not bounds:
            return torch.maximum(values, parts[1].max())
        below = parts[1][parts[1] <= low]
        above = parts[1][parts[1] > low]
        return torch.maximum(values, (-above).max() if values < 0 else below.max())

    assert second_moment_bound(parts[0], 0.04, total, largest) == pytest.approx(whole, rel=1e-12)


def test_only_tokens_that_move_away_can_be_left_out() -> None:
    log_ratio = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0])
    assert pushed_away(log_ratio, advantages).tolist() == [True, False, False, True, False]
