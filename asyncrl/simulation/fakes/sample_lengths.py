"""Distributions of the number of tokens in a completion."""

import math
import random
from collections.abc import Callable
from typing import TypeAlias

Lengths: TypeAlias = Callable[[random.Random], int]
"""Draws the number of tokens of one completion."""


def constant(tokens: int) -> Lengths:
    """Gives every completion the same length."""
    return lambda chance: tokens


def stragglers(tokens: int, share: float, times: int) -> Lengths:
    """Makes a share of the completions `times` as long as the others."""
    return lambda chance: tokens * times if chance.random() < share else tokens


def lognormal(median: int, sigma: float) -> Lengths:
    """Draws lengths with a long tail; sigma is the standard deviation of the logarithm."""
    return lambda chance: max(1, round(median * math.exp(chance.gauss(0.0, sigma))))
