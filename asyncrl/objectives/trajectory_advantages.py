"""Generalized advantage estimation for transitions of an environment, in float64."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def trajectory_advantages(
    rewards: Floats,
    values: Floats,
    next_values: Floats,
    terminated: NDArray[np.bool_],
    ended: NDArray[np.bool_],
    gamma: float,
    gae_lambda: float,
) -> Floats:
    """Computes A_t = delta_t + gamma lambda (1 - ended_t) A_(t+1), delta_t = r_t + gamma (1 - terminated_t) V'_t - V_t.

    Source: GAE (arXiv 1506.02438, eq. 16), cut where an episode ends; an episode that a time limit ended keeps the
    value of its last state (arXiv 1712.00378), as does the piece of an episode at the end of the array. All arrays are
    [transitions] of one environment, in order. next_values: V' of the state that the transition led to, before a reset.
    """
    deltas = rewards + gamma * np.where(terminated, 0.0, next_values) - values
    advantages = np.zeros_like(deltas)
    following = 0.0
    for step in reversed(range(len(deltas))):
        following = deltas[step] + (0.0 if ended[step] else gamma * gae_lambda * following)
        advantages[step] = following
    return advantages
