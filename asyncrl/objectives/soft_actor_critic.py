"""The losses of SAC: pure functions on flat tensors [transitions]. Log-probs are of whole actions, in nats.

Sources: soft actor-critic with a learned temperature (arXiv 1812.05905; equations in each function); the smaller of two
critics from clipped double Q-learning (arXiv 1802.09477, algorithm 1).
"""

import torch
from torch import Tensor


def soft_targets(
    rewards: Tensor, terminated: Tensor, next_values: Tensor, next_logprobs: Tensor, temperature: Tensor, gamma: float
) -> Tensor:
    """Computes y = r + gamma (1 - terminated) (Q'(s', a') - temperature log pi(a' | s')), without gradient.

    Source: arXiv 1812.05905, eq. 3 and 5. next_values: the smaller value of the two target critics for an action that
    the present policy sampled in s'. terminated: 1 where the episode ended by itself; an episode that a time limit cut
    off would have gone on, so its last state keeps its value (arXiv 1712.00378).
    """
    soft_values = next_values - temperature * next_logprobs
    return (rewards + gamma * (1 - terminated) * soft_values).detach()


def critics_loss(values: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Computes the sum over critics of mean(w 1/2 (Q - y)^2). Source: arXiv 1812.05905, eq. 5; weights of a prioritised
    replay arXiv 1511.05952, section 3.4. values: [critics, transitions]. weights: 1 with a uniform replay."""
    return (weights * (values - targets).square() / 2).mean(dim=1).sum()


def actor_loss(logprobs: Tensor, values: Tensor, temperature: Tensor) -> Tensor:
    """Computes mean(temperature log pi(a | s) - Q(s, a)) for actions with gradient. Source: arXiv 1812.05905, eq. 9."""
    return (temperature.detach() * logprobs - values).mean()


def temperature_loss(log_temperature: Tensor, logprobs: Tensor, target_entropy: float) -> Tensor:
    """Computes -temperature mean(log pi + target entropy), whose gradient raises the temperature while the entropy is
    below its target. Source: arXiv 1812.05905, eq. 18. Only the temperature has a gradient."""
    return -(log_temperature.exp() * (logprobs.detach() + target_entropy)).mean()


@torch.no_grad()
def move_towards(targets: list[Tensor], sources: list[Tensor], tau: float) -> None:
    """Sets each target to (1 - tau) target + tau source, in place. Source: arXiv 1812.05905, algorithm 1."""
    torch._foreach_lerp_(targets, sources, tau)
