"""Rewards for single tokens: when the trainer reads them, and what functions give each token of a sample."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import FunctionResult, Sample

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

Floats = NDArray[np.float64]


def reward_tokens(config: "Config") -> bool:
    """Returns whether some reward function gives each token a reward."""
    return any(function.by_token for function in config.reward.functions)


def stores_token_rewards(config: "Config") -> bool:
    """Returns whether the trainer reads the rewards of tokens. Without a critic their sum is compared."""
    return reward_tokens(config) and config.algorithm.advantage == "gae"


def token_rewards(sample: Sample, specs: Sequence[FunctionSpec], results: Sequence[FunctionResult]) -> Floats:
    """Returns the weighted sum of what the functions give each sampled token, float64 [tokens]."""
    found = np.zeros(sample.tokens)
    for spec, result in zip(specs, results, strict=True):
        if result.tokens:
            found += spec.weight * np.array(result.tokens)
    return found


def turn_sums(rewards: Floats, turn_tokens: Sequence[int] | NDArray[np.int32]) -> Floats:
    """Returns the sum of the rewards of each turn's tokens, float64 [turns]. Each turn has at least one token."""
    return np.add.reduceat(rewards, np.cumsum([0, *turn_tokens[:-1]]))
