"""Rewards under a cost limit: the combined advantage and its Lagrange multiplier (Safe RLHF, arXiv 2310.12773)."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def constrained_advantages(reward: Floats, cost: Floats, multiplier: float) -> Floats:
    """Computes (A_reward - lambda A_cost) / (1 + lambda) per token, the token weight in the gradient of appendix B.

    The paper clips the ratio in a term for rewards and in one for costs; the authors' program, and this one, only once.
    """
    combined: Floats = (reward - multiplier * cost) / (1.0 + multiplier)
    return combined


SMALLEST = 1e-8
"""Lower bound of the multiplier, which is updated in log space; costs far below the limit would drive it to 0."""


@dataclass(slots=True)
class Multiplier:
    """Holds lambda, the price of one unit of cost in units of reward.

    rate: step size of ln lambda. limit: allowed mean cost of an answer. largest: upper bound of lambda.
    """

    value: float
    rate: float
    limit: float
    largest: float

    def update(self, mean_cost: float) -> None:
        """Moves the multiplier after a training iteration on answers of this mean cost.

        ln lambda <- ln lambda + rate x lambda x (mean cost - limit): gradient ascent in log space, which keeps lambda
        positive (eq. 31, where J_C contains the limit).
        """
        log = math.log(self.value) + self.rate * self.value * (mean_cost - self.limit)
        self.value = math.exp(max(math.log(SMALLEST), min(log, math.log(self.largest))))
