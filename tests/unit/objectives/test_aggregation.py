"""The ways to average against their sums in float64, and that masking a token changes no other's weight."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.objectives.surrogate_losses import Aggregation, row_weights

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=20)


def average(aggregation: str, rows: list[np.ndarray], divisor: int) -> float:
    """Of the terms of the rows, as the papers write it."""
    match aggregation:
        case "token_mean":
            return np.concatenate(rows).mean()
        case "sequence_mean_token_sum":
            return float(np.mean([row.sum() for row in rows]))
        case "sequence_mean_token_mean":
            return float(np.mean([row.mean() for row in rows]))
        case _:
            return float(np.mean([row.sum() / divisor for row in rows]))


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"]
)
@given(lengths, st.integers(0, 1000))
def test_weighted_terms_add_up_to_the_average(aggregation: Aggregation, sizes: list[int], seed: int) -> None:
    rows = [np.random.default_rng([seed, index]).normal(size=size) for index, size in enumerate(sizes)]
    weights = row_weights(aggregation, torch.tensor(sizes), sum(sizes), len(sizes), 64).double().numpy()
    total = sum(weight * row.sum() for weight, row in zip(weights, rows, strict=True))
    np.testing.assert_allclose(total, average(aggregation, rows, 64), rtol=1e-5, atol=1e-6)


@pytest.mark.trap("batch_length_divisor")
def test_constant_divides_by_the_cap_and_never_by_the_longest_row() -> None:
    short = row_weights("constant", torch.tensor([3, 5]), 8, 2, 64)
    long = row_weights("constant", torch.tensor([3, 60]), 63, 2, 64)
    assert torch.equal(short, long)
    np.testing.assert_allclose(short.numpy(), 1 / (2 * 64))
