"""Token advantages: GAE from a critic's values, the KL penalty in the reward, and costs under a multiplier.

Trainer and critic both call `token_advantages` and get the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.engines.training.batch.masking import MaskedRow
from asyncrl.engines.training.batch.value_targets import COST, REWARD, ValueTarget
from asyncrl.engines.training.interface import TrainRow
from asyncrl.engines.training.state.data_parallel import Ranks
from asyncrl.objectives.advantages import STD_EPSILON
from asyncrl.objectives.gae import generalized_advantages, token_rewards
from asyncrl.objectives.kl import kl_to_go
from asyncrl.objectives.lagrangian import Multiplier, constrained_advantages

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Holds the advantages and returns of one sample, float64 [tokens]. returns: advantages + values."""

    advantages: Floats
    returns: Floats


def token_advantages(row: TrainRow, algorithm: AlgorithmConfig, target: ValueTarget = REWARD) -> TokenAdvantages:
    """Computes GAE advantages and returns from the score and the values of a sample.

    With the KL in the reward, each token also pays the KL of the policy that sampled it to the reference. That KL is
    constant, so trainer and critic use the same one.
    """
    sample = target.of(row)
    assert algorithm.gamma is not None, "the config requires gamma with gae"
    assert algorithm.gae_lambda is not None, "the config requires gae_lambda with gae"
    kl = None
    if row.reference_logprobs is not None and algorithm.kl_in == "reward":
        kl = row.logprobs.astype(np.float64) - row.reference_logprobs
    values = sample.values.astype(np.float64)
    rewards = token_rewards(sample.score, len(values), kl, algorithm.kl * target.kl_share(algorithm))
    advantages = generalized_advantages(rewards, values, algorithm.gamma, algorithm.gae_lambda)
    return TokenAdvantages(advantages, advantages + values)


def with_token_advantages(
    masked: Sequence[MaskedRow],
    algorithm: AlgorithmConfig,
    kl: float,
    ranks: Ranks,
    multiplier: Multiplier | None = None,
) -> list[MaskedRow]:
    """Returns the rows with the advantage of each token, where a critic or a KL in the reward makes them differ.

    kl: current coefficient of the KL. multiplier: price of costs, None without costs.
    """
    if algorithm.advantage == "gae":
        advantages = _gae_advantages(masked, algorithm, ranks, multiplier)
    elif kl > 0 and algorithm.kl_in == "reward":
        advantages = [_penalized_advantages(item.row, kl) for item in masked]
    else:
        return list(masked)
    rows = [replace(item.row, advantage=each) for item, each in zip(masked, advantages, strict=True)]
    return [replace(item, row=row) for item, row in zip(masked, rows, strict=True)]


def _penalized_advantages(row: TrainRow, kl: float) -> Floats:
    assert row.reference_logprobs is not None, f"sample {row.key} has no reference log-probs"
    return row.advantage - kl * kl_to_go(row.logprobs, row.reference_logprobs)


def _gae_advantages(
    masked: Sequence[MaskedRow], algorithm: AlgorithmConfig, ranks: Ranks, multiplier: Multiplier | None
) -> list[Floats]:
    """Computes the advantages, standardized on request over all response tokens of the batch on all ranks.

    Stale tokens enter mean and deviation, so that masking re-weights nothing; truncated samples that left the loss do
    not.
    """
    found = [_constrained_advantages(item.row, algorithm, multiplier) for item in masked]
    if not algorithm.normalize_std:
        return found
    counted = [each for item, each in zip(masked, found, strict=True) if item.counted]
    mean, scale = _moments(counted, ranks)
    return [(each - mean) / scale for each in found]


def _constrained_advantages(row: TrainRow, algorithm: AlgorithmConfig, multiplier: Multiplier | None) -> Floats:
    of_reward = token_advantages(row, algorithm).advantages
    if multiplier is None:
        return of_reward
    return constrained_advantages(of_reward, token_advantages(row, algorithm, COST).advantages, multiplier.value)


def mean_cost(masked: Sequence[MaskedRow], ranks: Ranks) -> float:
    """Averages the cost over the samples of all ranks, masked samples included."""
    own = [sum(COST.of(item.row).score for item in masked), len(masked)]
    total, count = ranks.sum(torch.tensor(own, dtype=torch.float64)).tolist()
    return float(total / count)


def _moments(found: Sequence[Floats], ranks: Ranks) -> tuple[float, float]:
    """Returns mean and standard deviation (plus STD_EPSILON) over the tokens of all ranks."""
    flat = np.concatenate([np.zeros(0), *found])
    count, total = ranks.sum(torch.tensor([float(len(flat)), float(flat.sum())], dtype=torch.float64)).tolist()
    mean = total / max(1.0, count)
    (squares,) = ranks.sum(torch.tensor([float(((flat - mean) ** 2).sum())], dtype=torch.float64)).tolist()
    return mean, float(np.sqrt(squares / max(1.0, count - 1))) + STD_EPSILON
