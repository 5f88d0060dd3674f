"""One ratio, stated; weights and rejections against their formulas on ragged rows."""

import numpy as np
import pytest
import torch

from asyncrl.objectives import corrections, losses
from asyncrl.objectives.corrections import Level, Rejection, effective_sample_share
from asyncrl.objectives.ragged import Ragged

LENGTHS = (40, 1, 0, 30, 29)
ROWS = Ragged.of(LENGTHS)
ENDS = np.cumsum(LENGTHS)[:-1]


def logprobs(seed: int) -> np.ndarray:
    return -np.abs(np.random.default_rng(seed).normal(1.0, 0.8, 100))


LOG_WEIGHT = logprobs(1) * 0.3 - logprobs(2) * 0.3


def of_rows(values: np.ndarray, how: str) -> np.ndarray:
    parts = np.split(values, ENDS)
    return np.concatenate([np.full(len(part), getattr(part, how)()) if len(part) else part for part in parts])


def test_a_ratio_is_the_quotient_of_both_probabilities() -> None:
    current = logprobs(0)
    behaviour = logprobs(1)
    ratio = losses.log_ratio(torch.tensor(current), torch.tensor(behaviour))
    np.testing.assert_allclose(ratio.numpy(), current - behaviour)


def test_the_proximal_policy_carries_no_gradient() -> None:
    proximal = torch.tensor(logprobs(1), requires_grad=True)
    current = torch.tensor(logprobs(0), requires_grad=True)
    ratio = losses.log_ratio(current, proximal).exp()
    ratio.sum().backward()
    assert proximal.grad is None
    np.testing.assert_allclose(current.grad.numpy(), ratio.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_the_formulas(level: Level) -> None:
    logs = LOG_WEIGHT if level == "token" else of_rows(LOG_WEIGHT, "sum")
    leveled = corrections.weight_at_level(torch.tensor(LOG_WEIGHT), level, ROWS)
    capped = corrections.capped_weight(leveled, 1.5)
    masked = corrections.masked_weight(leveled, 0.5, 1.5)
    weight = np.exp(logs)
    np.testing.assert_allclose(capped.numpy(), np.minimum(weight, 1.5), rtol=1e-12)
    np.testing.assert_allclose(masked.numpy(), np.where((weight >= 0.5) & (weight <= 1.5), weight, 0), rtol=1e-12)
    assert (masked == 0).any()


def test_a_product_that_overflows_is_capped_or_left_out_and_never_not_a_number() -> None:
    huge = corrections.weight_at_level(torch.full((100,), 50.0), "sequence", ROWS)
    assert torch.equal(corrections.capped_weight(huge, 2.0), torch.full((100,), 2.0))
    assert torch.equal(corrections.masked_weight(huge, 0.5, 2.0), torch.zeros(100))


@pytest.mark.parametrize("rejection", ["geometric", "token_k2", "token_k3", "sequence_k2", "sequence_k3"])
def test_rejections_are_the_formulas(rejection: Rejection) -> None:
    k2 = LOG_WEIGHT**2 / 2
    k3 = np.exp(LOG_WEIGHT) - 1 - LOG_WEIGHT
    geometric = np.exp(of_rows(LOG_WEIGHT, "mean"))
    expected = {
        "geometric": (geometric >= 0.95) & (geometric <= 1.05),
        "token_k2": k2 <= 0.06,
        "token_k3": k3 <= 0.06,
        "sequence_k2": of_rows(k2, "mean") <= 0.06,
        "sequence_k3": of_rows(k3, "mean") <= 0.06,
    }[rejection]
    low, high = (0.95, 1.05) if rejection == "geometric" else (0.0, 0.06)
    kept = corrections.accepted(torch.tensor(LOG_WEIGHT), ROWS, rejection, low, high)
    assert kept.tolist() == expected.tolist()
    assert 0 < expected.sum() < 100


def test_the_bounds_of_a_weight_are_within_its_interval() -> None:
    same = torch.zeros(100, dtype=torch.float64)
    one = torch.ones_like(same)
    none = torch.zeros_like(same)
    for floor, cap, expected in ((1.0, 1.5, one), (0.5, 1.0, one), (1.001, 1.5, none), (0.5, 0.999, none)):
        assert torch.equal(corrections.masked_weight(same, floor, cap), expected)
        assert torch.equal(corrections.accepted(same, ROWS, "geometric", floor, cap), expected.bool())


@pytest.mark.parametrize("rejection", ["token_k2", "token_k3", "sequence_k2", "sequence_k3"])
def test_a_divergence_of_exactly_the_bound_passes(rejection: Rejection) -> None:
    same = torch.zeros(100, dtype=torch.float64)
    far = torch.full((100,), 2.0, dtype=torch.float64)
    assert corrections.accepted(same, ROWS, rejection, 0.0, 0.0).all()
    if rejection.endswith("k2"):
        assert corrections.accepted(far, ROWS, rejection, 0.0, 2.0).all()
        assert not corrections.accepted(far, ROWS, rejection, 0.0, 1.999).any()


@pytest.mark.trap("whole_answer_weight")
def test_effective_share_is_one_for_equal_weights_and_falls_with_one_huge_weight() -> None:
    def share(weights: np.ndarray) -> float:
        return effective_sample_share(weights.sum(), (weights**2).sum(), len(weights))

    np.testing.assert_allclose(share(np.full(50, 3.0)), 1.0)
    np.testing.assert_allclose(share(np.array([1e6] + [1.0] * 99)), 0.01, rtol=1e-3)
    assert effective_sample_share(0.0, 0.0, 0.0) == 0.0
