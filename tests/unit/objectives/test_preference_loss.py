"""The loss of Bradley and Terry against its formula."""

import math

import pytest
import torch

from asyncrl.objectives.preference_loss import bradley_terry_loss


def test_the_loss_is_minus_the_log_probability_of_what_was_picked() -> None:
    better, other = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.0, 1.0, 0.5])
    chances = [1 / (1 + math.exp(-difference)) for difference in (1.0, -3.0, 0.0)]
    wins = torch.tensor([1.0, 1.0, 0.5])
    expected = [-math.log(chances[0]), -math.log(chances[1]), math.log(2)]
    assert bradley_terry_loss(better, other, wins).tolist() == pytest.approx(expected)


def test_the_gradient_is_the_error_of_the_probability() -> None:
    better, other = torch.tensor([0.3], requires_grad=True), torch.tensor([-0.4], requires_grad=True)
    torch.autograd.backward(bradley_terry_loss(better, other, torch.tensor([1.0])).sum())
    assert better.grad is not None
    assert other.grad is not None
    assert better.grad.item() == pytest.approx(-(1 - torch.sigmoid(torch.tensor(0.7)).item()))
    assert other.grad.item() == -better.grad.item()


def test_far_scores_stay_finite() -> None:
    loss = bradley_terry_loss(torch.tensor([-500.0]), torch.tensor([500.0]), torch.tensor([1.0]))
    assert loss.item() == 1000.0
