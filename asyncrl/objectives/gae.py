"""Generalized advantage estimation (GAE, arXiv 1506.02438) for one answer, in float64."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def token_rewards(reward: float, tokens: int, kl: Floats | None = None, coefficient: float = 0.0) -> Floats:
    """Returns r_t = -coefficient x kl_t, plus the reward of the answer at its last token; float64 [tokens].

    Source: the reward of RLHF (arXiv 1909.08593, section 2.2; arXiv 2203.02155, section 3.5). kl: [tokens], the k1
    estimate of the sampling policy against the reference, or None for no KL penalty.
    """
    rewards: Floats = np.zeros(tokens) if kl is None else -coefficient * kl
    rewards[-1] += reward
    return rewards


def generalized_advantages(rewards: Floats, values: Floats, gamma: float, gae_lambda: float) -> Floats:
    """Computes A_t = sum over l of (gamma lambda)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t (eq. 16).

    An answer is an episode: the value after its last token is 0, even if the answer was truncated. rewards, values:
    float64 [tokens]; values[t] is the value before token t is sampled. Returns float64 [tokens].
    """
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    advantages = np.zeros_like(deltas)
    following = 0.0
    for token in reversed(range(len(deltas))):
        following = deltas[token] + gamma * gae_lambda * following
        advantages[token] = following
    return advantages
