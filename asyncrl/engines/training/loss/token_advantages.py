"""What each token of a sample is credited with, where that differs from token to token.

With a critic, trainer and critic compute it alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config import Algorithm
from asyncrl.engines.training.interface import TrainRow
from asyncrl.engines.training.masking import Masked
from asyncrl.engines.training.ranks import Ranks
from asyncrl.engines.training.signals import COST, REWARD, Signal
from asyncrl.objectives.advantages import STD_EPSILON
from asyncrl.objectives.gae import generalized_advantages, token_rewards
from asyncrl.objectives.kl import kl_to_go
from asyncrl.objectives.lagrangian import Multiplier, constrained_advantages

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Credit:
    """float64 [tokens], of one sample. returns: advantages + values, which the critic is to learn."""

    advantages: Floats
    returns: Floats


def credit_of(row: TrainRow, algorithm: Algorithm, signal: Signal = REWARD) -> Credit:
    """Of the sample's reward or cost, the values it was judged with and, with a KL in the reward, its reference.

    The KL is that of the policy which sampled: it is known for good, and the same for trainer and critic.
    """
    judged = signal.of(row)
    assert algorithm.gamma is not None, "the config needs it with gae"
    assert algorithm.gae_lambda is not None, "the config needs it with gae"
    kl = None
    if row.reference_logprobs is not None and algorithm.kl_in == "reward":
        kl = row.logprobs.astype(np.float64) - row.reference_logprobs
    values = judged.values.astype(np.float64)
    rewards = token_rewards(judged.score, len(values), kl, algorithm.kl * signal.kl_share(algorithm))
    advantages = generalized_advantages(rewards, values, algorithm.gamma, algorithm.gae_lambda)
    return Credit(advantages, advantages + values)


def with_credit(
    masked: Sequence[Masked], algorithm: Algorithm, kl: float, ranks: Ranks, multiplier: Multiplier | None = None
) -> list[Masked]:
    """The rows with what each of their tokens is credited with: by a critic, or with the KL in the reward.

    kl: coefficient of the KL now. multiplier: what costs are weighed with, None without any.
    """
    if algorithm.advantage == "gae":
        return _with_advantages(masked, _judged(masked, algorithm, ranks, multiplier))
    if kl > 0 and algorithm.kl_in == "reward":
        return _with_advantages(masked, [_shaped(item.row, kl) for item in masked])
    return list(masked)


def _with_advantages(masked: Sequence[Masked], advantages: Sequence[Floats]) -> list[Masked]:
    rows = [replace(item.row, advantage=each) for item, each in zip(masked, advantages, strict=True)]
    return [replace(item, row=row) for item, row in zip(masked, rows, strict=True)]


def _shaped(row: TrainRow, kl: float) -> Floats:
    assert row.reference_logprobs is not None, f"sample {row.key} has no reference log-probs"
    return row.advantage - kl * kl_to_go(row.logprobs, row.reference_logprobs)


def _judged(
    masked: Sequence[Masked], algorithm: Algorithm, ranks: Ranks, multiplier: Multiplier | None
) -> list[Floats]:
    """Standardized, where asked for, by all response tokens of the batch, of all ranks: of masked tokens too, as what
    is too old re-weights nothing, but not of truncated answers that are left out altogether."""
    found = [_advantages(item.row, algorithm, multiplier) for item in masked]
    if not algorithm.normalize_std:
        return found
    counted = [each for item, each in zip(masked, found, strict=True) if item.counted]
    mean, scale = _moments(counted, ranks)
    return [(each - mean) / scale for each in found]


def _advantages(row: TrainRow, algorithm: Algorithm, multiplier: Multiplier | None) -> Floats:
    of_reward = credit_of(row, algorithm).advantages
    if multiplier is None:
        return of_reward
    return constrained_advantages(of_reward, credit_of(row, algorithm, COST).advantages, multiplier.value)


def mean_cost(masked: Sequence[Masked], ranks: Ranks) -> float:
    """Of the samples of all ranks, those that are masked too."""
    own = [sum(COST.of(item.row).score for item in masked), len(masked)]
    total, count = ranks.sum(torch.tensor(own, dtype=torch.float64)).tolist()
    return float(total / count)


def _moments(found: Sequence[Floats], ranks: Ranks) -> tuple[float, float]:
    """Mean and standard deviation over the tokens of all ranks."""
    flat = np.concatenate([np.zeros(0), *found])
    count, total = ranks.sum(torch.tensor([float(len(flat)), float(flat.sum())], dtype=torch.float64)).tolist()
    mean = total / max(1.0, count)
    (squares,) = ranks.sum(torch.tensor([float(((flat - mean) ** 2).sum())], dtype=torch.float64)).tolist()
    return mean, float(np.sqrt(squares / max(1.0, count - 1))) + STD_EPSILON
