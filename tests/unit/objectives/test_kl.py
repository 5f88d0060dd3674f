"""KL estimators against float64 formulas, and their gradients against the KL of a small distribution."""

from itertools import product

import numpy as np
import pytest
import torch

from asyncrl.objectives.kl import FAR, KlCoefficient, KlEstimator, kl_estimate, kl_loss, kl_to_go

DRAW = np.random.default_rng(3)
LOGITS = DRAW.normal(0, 1, 12)
REFERENCE = np.log(DRAW.dirichlet(np.ones(12)))


def true_kl_gradient(logits: np.ndarray) -> np.ndarray:
    """Of KL(softmax(logits) || reference) in the logits, by finite differences."""

    def kl(logits: np.ndarray) -> float:
        logprobs = logits - np.log(np.exp(logits).sum())
        return float((np.exp(logprobs) * (logprobs - REFERENCE)).sum())

    steps = 1e-6 * np.eye(len(logits))
    return np.array([(kl(logits + step) - kl(logits - step)) / 2e-6 for step in steps])


def expected_loss_gradient(estimator: KlEstimator, sampler: np.ndarray | None = None) -> np.ndarray:
    """Gradient of the expected KL loss, each id drawn by `sampler` (log-probs; default: the policy itself)."""
    logits = torch.tensor(LOGITS, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    behaviour = logprobs.detach() if sampler is None else torch.tensor(sampler)
    weight = (logprobs - behaviour).exp()
    term = weight.detach() * kl_estimate(logprobs, torch.tensor(REFERENCE), estimator)
    if estimator != "k1":
        term = kl_loss(logprobs, torch.tensor(REFERENCE), estimator, weight)
    (behaviour.exp() * term).sum().backward()
    return logits.grad.numpy()


@pytest.mark.trap("kl_gradient")
def test_k1_as_a_loss_has_zero_expected_gradient_and_is_refused() -> None:
    np.testing.assert_allclose(expected_loss_gradient("k1"), 0, atol=1e-12)
    ones = torch.ones(3)
    with pytest.raises(AssertionError, match="zero expected gradient"):
        kl_loss(ones, ones, "k1", ones)


@pytest.mark.trap("kl_gradient")
def test_k2_as_a_loss_has_the_gradient_of_the_kl() -> None:
    np.testing.assert_allclose(expected_loss_gradient("k2"), true_kl_gradient(LOGITS), atol=1e-8)


@pytest.mark.trap("kl_gradient")
def test_k3_as_a_loss_is_biased_but_points_downhill() -> None:
    found = expected_loss_gradient("k3")
    true = true_kl_gradient(LOGITS)
    assert np.abs(found - true).max() > 1e-2
    assert found @ true > 0


@pytest.mark.trap("kl_gradient")
def test_off_policy_kl_needs_the_policys_weight() -> None:
    sampler = np.log(np.random.default_rng(4).dirichlet(np.ones(12)))
    np.testing.assert_allclose(expected_loss_gradient("k2", sampler), true_kl_gradient(LOGITS), atol=1e-8)


IDS = 3
LENGTH = 3
ANSWERS = list(product(range(IDS), repeat=LENGTH))
REFERENCE_OF_ANSWERS = np.log(DRAW.dirichlet(np.ones(IDS), len(ANSWERS) * LENGTH)).reshape(-1, IDS)


def states(answer: tuple[int, ...]) -> list[int]:
    """Which row of a table of logits each token of an answer is drawn from: what came before it."""
    return [
        sum(IDS**place for place in range(at)) + int("0" + "".join(map(str, answer[:at])), IDS) for at in range(LENGTH)
    ]


def logprobs_of(logits: torch.Tensor, answer: tuple[int, ...]) -> torch.Tensor:
    """[tokens] of an answer, each given those before it."""
    return logits.log_softmax(-1)[states(answer), list(answer)]


@pytest.mark.trap("kl_gradient")
def test_k1_in_the_reward_has_the_gradient_of_the_kl_of_answers() -> None:
    """Every answer of three tokens, weighed with its probability: the gradient is exact."""
    logits = torch.tensor(DRAW.normal(0, 1, (IDS**LENGTH, IDS)), requires_grad=True)
    reference = torch.tensor(REFERENCE_OF_ANSWERS[: IDS**LENGTH])
    true = torch.zeros(())
    ours = torch.zeros(())
    for answer in ANSWERS:
        now = logprobs_of(logits, answer)
        other = reference[states(answer), list(answer)]
        advantages = -torch.tensor(kl_to_go(now.detach().numpy(), other.numpy()))
        ratio = (now - now.detach()).exp()
        ours = ours + now.detach().sum().exp() * (-ratio * advantages).sum()
        true = true + now.sum().exp() * (now - other).sum()
    wanted, found = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (true, ours))
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-9)
    assert wanted.abs().max() > 0.01


def test_the_kl_to_go_is_that_of_a_token_and_all_after_it() -> None:
    found = kl_to_go(np.float32([-1, -2, -3]), np.float32([-2, -2, -5]))
    np.testing.assert_array_equal(found, [3.0, 2.0, 2.0])


def test_k3_of_a_token_that_the_policy_all_but_excludes_is_finite() -> None:
    far = kl_estimate(torch.tensor([-95.0]), torch.tensor([-1.0]), "k3")
    torch.testing.assert_close(far, torch.tensor([float(np.exp(FAR)) - 1 - 94]))


def test_a_fixed_coefficient_stays() -> None:
    coefficient = KlCoefficient(0.5)
    coefficient.update(3.0)
    assert coefficient.value == 0.5


@pytest.mark.parametrize("difference", [-FAR, -12.0, -2.5, 2.5, 30.0])
def test_k3_is_its_formula_up_to_twenty_nats(difference: float) -> None:
    found = kl_estimate(torch.tensor([difference], dtype=torch.float64), torch.zeros(1), "k3")
    assert float(found) == pytest.approx(np.exp(-difference) - 1 + difference, rel=1e-9)
