"""One ratio, stated: against the engine's log-probs, or against the proximal ones with a capped weight."""

import numpy as np
import torch

from asyncrl.objectives.corrections import against_engine, against_proximal, effective_sample_share


def logprobs(seed: int) -> np.ndarray:
    return -np.abs(np.random.default_rng(seed).normal(1.0, 0.8, 100))


def test_engine_ratio_has_no_other_weight() -> None:
    current, behaviour = logprobs(0), logprobs(1)
    importance = against_engine(torch.tensor(current), torch.tensor(behaviour))
    np.testing.assert_allclose(importance.log_ratio.numpy(), current - behaviour)
    assert torch.equal(importance.weight, torch.ones(100, dtype=torch.float64))


def test_recomputed_ratio_and_capped_weight_are_the_formula() -> None:
    current, proximal, behaviour = logprobs(0), logprobs(1), logprobs(2)
    importance = against_proximal(*map(torch.tensor, (current, proximal, behaviour)), cap=2.0)
    np.testing.assert_allclose(importance.log_ratio.numpy(), current - proximal)
    np.testing.assert_allclose(importance.weight.numpy(), np.minimum(np.exp(proximal - behaviour), 2.0))
    assert importance.weight.max() == 2.0


def test_the_weight_carries_no_gradient() -> None:
    proximal = torch.tensor(logprobs(1), requires_grad=True)
    current = torch.tensor(logprobs(0), requires_grad=True)
    importance = against_proximal(current, proximal, torch.tensor(logprobs(2)), cap=2.0)
    (importance.log_ratio.exp() * importance.weight).sum().backward()
    assert proximal.grad is None
    np.testing.assert_allclose(
        current.grad.numpy(), (importance.log_ratio.exp() * importance.weight).detach().numpy(), rtol=1e-12
    )


def test_t25_effective_share_is_one_for_equal_weights_and_falls_with_one_huge_weight() -> None:
    def share(weights: np.ndarray) -> float:
        return effective_sample_share(weights.sum(), (weights**2).sum(), len(weights))

    np.testing.assert_allclose(share(np.full(50, 3.0)), 1.0)
    np.testing.assert_allclose(share(np.array([1e6] + [1.0] * 99)), 0.01, rtol=1e-3)
    assert effective_sample_share(0.0, 0.0, 0.0) == 0.0
