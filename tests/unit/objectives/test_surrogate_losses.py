"""Every policy loss against its paper's formula in float64, on ragged rows, and its gradient by finite differences."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from asyncrl.objectives import losses
from asyncrl.objectives.losses import SurrogateLoss
from asyncrl.objectives.ragged import Ragged

LOW = 0.2
HIGH = 0.28
LENGTHS = (5, 1, 0, 7, 3)
ENDS = np.cumsum(LENGTHS)[:-1]
ROWS = Ragged.of(LENGTHS)
DRAW = np.random.default_rng(0)
OLD = DRAW.normal(-1.5, 0.5, sum(LENGTHS))
CURRENT = OLD + DRAW.normal(0, 0.4, sum(LENGTHS))
CURRENT[[0, 7]] += [1.5, -1.5]
OF_ROWS = np.array([-1.0, 0.7, 2.0, 1.3, 0.0])
ADVANTAGES = np.repeat(OF_ROWS, LENGTHS)


def by_row(values: np.ndarray) -> list[np.ndarray]:
    return np.split(values, ENDS)


def row_means(values: np.ndarray) -> np.ndarray:
    """Of each token: the mean over its row."""
    return np.concatenate([np.full(len(part), part.mean()) if len(part) else part for part in by_row(values)])


def clip(ratio: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    return -np.minimum(ratio * advantages, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantages)


def dual_clip(current: np.ndarray) -> np.ndarray:
    terms = clip(np.exp(current - OLD), ADVANTAGES)
    return np.where(ADVANTAGES < 0, np.minimum(terms, -3 * ADVANTAGES), terms)


def gmpo(current: np.ndarray) -> np.ndarray:
    """-A (prod min-or-max of r and its clip) ^ (1 / |o|), sequence by sequence."""
    terms = []
    for ratio, advantage in zip(by_row(np.exp(current - OLD)), OF_ROWS, strict=True):
        bounded = np.clip(ratio, np.exp(-0.4), np.exp(0.4))
        held = np.minimum(ratio, bounded) if advantage > 0 else np.maximum(ratio, bounded)
        terms.append(np.full(len(ratio), -advantage * np.prod(held) ** (1 / max(1, len(ratio)))))
    return np.concatenate(terms)


def sapo(current: np.ndarray) -> np.ndarray:
    tau = np.where(ADVANTAGES > 0, 1.0, 1.05)
    return -4 / tau / (1 + np.exp(-tau * (np.exp(current - OLD) - 1))) * ADVANTAGES


KEPT = (CURRENT - OLD) ** 2 < 0.1
A = torch.tensor(ADVANTAGES)
OLD_TENSOR = torch.tensor(OLD)
Formula = Callable[[np.ndarray], np.ndarray]
Function = Callable[[torch.Tensor], SurrogateLoss]

PAIRS: dict[str, tuple[Formula, Function]] = {
    "clip": (
        lambda c: clip(np.exp(c - OLD), ADVANTAGES),
        lambda c: losses.clipped_loss(c - OLD_TENSOR, A, LOW, HIGH),
    ),
    "dual clip": (dual_clip, lambda c: losses.clipped_loss(c - OLD_TENSOR, A, LOW, HIGH, 3.0)),
    "gspo": (
        lambda c: clip(np.exp(row_means(c - OLD)), ADVANTAGES),
        lambda c: losses.clipped_loss(losses.sequence_log_ratio(c - OLD_TENSOR, ROWS), A, LOW, HIGH),
    ),
    "gmpo": (gmpo, lambda c: losses.geometric_mean_loss(c - OLD_TENSOR, A, ROWS, 0.4, 0.4)),
    "m2po": (
        lambda c: np.where(KEPT, -np.exp(c - OLD) * ADVANTAGES, 0),
        lambda c: losses.kept_ratio_loss(c - OLD_TENSOR, A, torch.tensor(KEPT)),
    ),
    "sapo": (sapo, lambda c: losses.soft_gate_loss(c - OLD_TENSOR, A, 1.0, 1.05)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_terms_are_the_formula(name: str) -> None:
    formula, function = PAIRS[name]
    np.testing.assert_allclose(function(torch.tensor(CURRENT)).terms.numpy(), formula(CURRENT), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    formula, function = PAIRS[name]
    variable = torch.tensor(CURRENT, requires_grad=True)
    function(variable).terms.sum().backward()
    steps = 1e-6 * np.eye(len(CURRENT))
    slopes = [(formula(CURRENT + step).sum() - formula(CURRENT - step).sum()) / 2e-6 for step in steps]
    np.testing.assert_allclose(variable.grad.numpy(), slopes, atol=1e-7)


@pytest.mark.parametrize("name", ["clip", "dual clip", "m2po"])
def test_what_is_held_is_exactly_what_has_no_gradient(name: str) -> None:
    variable = torch.tensor(CURRENT, requires_grad=True)
    found = PAIRS[name][1](variable)
    found.terms.sum().backward()
    moved = (variable.grad != 0) | (A == 0)
    assert found.clipped.any()
    assert torch.equal(found.clipped & (A != 0), ~moved)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_clip_high_bounds_rises_and_clip_low_bounds_falls(advantage: float) -> None:
    ratios = torch.tensor([0.5, 1.0, 2.0]).log()
    found = losses.clipped_loss(ratios, torch.full((3,), advantage), LOW, HIGH)
    expected = [-0.5, -1.0, -(1 + HIGH)] if advantage > 0 else [1 - LOW, 1.0, 2.0]
    torch.testing.assert_close(found.terms, torch.tensor(expected))


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
@pytest.mark.trap("masked_denominators")
def test_a_token_of_weight_0_trains_nothing_and_changes_no_other_where_rows_have_one_ratio(name: str) -> None:
    gradients = []
    weights = torch.ones(len(OLD), dtype=torch.float64)
    for left_out in (None, 2):
        if left_out is not None:
            weights[left_out] = 0
        variable = torch.tensor(CURRENT, requires_grad=True)
        (weights * PAIRS[name][1](variable).terms).sum().backward()
        gradients.append(variable.grad)
    assert gradients[0][2] != 0
    torch.testing.assert_close(gradients[1], gradients[0] * weights, rtol=0, atol=0)


@pytest.mark.parametrize(("advantage", "held_there"), [(1.0, [False, False, True]), (-1.0, [True, False, False])])
def test_gmpo_holds_each_side_at_its_own_bound(advantage: float, held_there: list[bool]) -> None:
    log_ratio = torch.tensor([-0.6, 0.1, 0.6])
    found = losses.geometric_mean_loss(log_ratio, torch.full((3,), advantage), Ragged.of([3]), 0.2, 0.5)
    bounded = [-0.6, 0.1, 0.5] if advantage > 0 else [-0.2, 0.1, 0.6]
    torch.testing.assert_close(found.terms, torch.full((3,), -advantage * np.exp(np.mean(bounded))))
    assert found.clipped.tolist() == held_there
    torch.testing.assert_close(found.ratio, log_ratio.exp())


def test_cispo_clips_the_weight_and_leaves_every_token_its_gradient() -> None:
    variable = torch.tensor(CURRENT, requires_grad=True)
    found = losses.clipped_weight_loss(variable - OLD_TENSOR, variable, A, 1.0, HIGH)
    found.terms.sum().backward()
    weight = np.minimum(np.exp(CURRENT - OLD), 1 + HIGH)
    np.testing.assert_allclose(found.terms.detach().numpy(), -weight * ADVANTAGES * CURRENT, rtol=1e-12)
    np.testing.assert_allclose(variable.grad.numpy(), -weight * ADVANTAGES, rtol=1e-12)
    assert torch.equal(found.clipped, torch.tensor(np.exp(CURRENT - OLD) > 1 + HIGH))


@pytest.mark.parametrize("name", [*PAIRS, "cispo"])
def test_an_unchanged_policy_has_the_gradient_of_reinforce(name: str) -> None:
    variable = torch.tensor(OLD, requires_grad=True)
    if name == "m2po":
        found = losses.kept_ratio_loss(variable - OLD_TENSOR, A, torch.ones(len(OLD), dtype=torch.bool))
    elif name == "cispo":
        found = losses.clipped_weight_loss(variable - OLD_TENSOR, variable, A, 1.0, 4.0)
    else:
        found = PAIRS[name][1](variable)
    found.terms.sum().backward()
    np.testing.assert_allclose(variable.grad.numpy(), -ADVANTAGES, rtol=1e-12)
    assert not found.clipped.any()


def test_rows_without_tokens_add_nothing() -> None:
    values = torch.arange(float(sum(LENGTHS)))
    assert ROWS.sum(values)[2] == 0
    assert ROWS.mean(values)[2] == 0
    empty = Ragged.of([0, 0])
    assert empty.mean(torch.zeros(0)).tolist() == [0, 0]
