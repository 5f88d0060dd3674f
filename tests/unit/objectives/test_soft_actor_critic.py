"""The losses of SAC against closed forms, and where their gradients go."""

import pytest
import torch

from asyncrl.objectives.soft_actor_critic import (
    actor_loss,
    critics_loss,
    move_towards,
    soft_targets,
    temperature_loss,
)


def test_a_target_is_the_reward_and_the_soft_value_of_the_next_state() -> None:
    rewards, terminated = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 0.0])
    values, logprobs = torch.tensor([10.0, 20.0, 30.0], requires_grad=True), torch.tensor([-1.0, -1.0, 2.0])
    targets = soft_targets(rewards, terminated, values, logprobs, torch.tensor(0.5), 0.9)
    torch.testing.assert_close(targets, torch.tensor([1 + 0.9 * 10.5, 2.0, 3 + 0.9 * 29.0]))
    assert not targets.requires_grad


def test_the_loss_of_the_critics_is_half_the_weighted_square_error_of_both() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    loss = critics_loss(values, torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.5]))
    assert loss.item() == pytest.approx((1 / 2 + 0) / 2 + (9 / 2 + 0.5 * 9 / 2) / 2)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, torch.tensor([[0.5, 0.0], [1.5, 0.75]]))


def test_the_actor_gains_value_and_entropy() -> None:
    logprobs, values = torch.tensor([1.0, -1.0], requires_grad=True), torch.tensor([2.0, 4.0], requires_grad=True)
    temperature = torch.tensor(0.2, requires_grad=True)
    loss = actor_loss(logprobs, values, temperature)
    assert loss.item() == pytest.approx(((0.2 - 2) + (-0.2 - 4)) / 2)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.1, 0.1]))
    torch.testing.assert_close(values.grad, torch.tensor([-0.5, -0.5]))
    assert temperature.grad is None


@pytest.mark.parametrize(("entropy", "rises"), [(0.5, True), (2.0, False)])
def test_the_temperature_rises_while_the_entropy_is_below_its_target(entropy: float, rises: bool) -> None:
    log_temperature = torch.tensor(0.3, requires_grad=True)
    loss = temperature_loss(log_temperature, torch.full((4,), -entropy), target_entropy=1.0)
    loss.backward()
    assert log_temperature.grad is not None
    assert log_temperature.grad.item() == pytest.approx(-torch.tensor(0.3).exp().item() * (1.0 - entropy))
    assert (log_temperature.grad.item() < 0) == rises


def test_targets_move_a_share_of_the_way_in_place() -> None:
    target, source = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0])
    move_towards([target], [source], 0.25)
    torch.testing.assert_close(target, torch.tensor([1.5, 2.0]))
