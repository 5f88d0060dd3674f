"""Token advantages: GAE from a critic's values, the KL penalty in the reward, and costs under a multiplier."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.engines.training.batch.masking import MaskedRow
from asyncrl.engines.training.batch.train_rows import COST, REWARD, TrainRow, ValueTarget
from asyncrl.engines.training.ranks.rank_group import Ranks
from asyncrl.objectives.advantages import STD_EPSILON, generalized_advantages, token_rewards
from asyncrl.objectives.kl import kl_to_go
from asyncrl.objectives.lagrangian import Multiplier, constrained_advantages

Floats = NDArray[np.float64]


def token_advantages(row: TrainRow, algorithm: AlgorithmConfig, target: ValueTarget = REWARD) -> Floats:
    """Computes GAE advantages, float64 [tokens], from the score and the values of a sample.

    Trainer and critic call it with the same numbers. With the KL in the reward, each token also pays the KL of the
    policy that sampled it to the reference, which is constant. With costs, half of the penalty is subtracted from the
    reward and half is added to the cost, so that its weight does not depend on the multiplier (Safe RLHF, arXiv
    2310.12773, appendix B).
    """
    score, values, _ = target.of(row)
    assert algorithm.gamma is not None, "the config requires gamma with gae"
    assert algorithm.gae_lambda is not None, "the config requires gae_lambda with gae"
    kl = None
    share = 1.0
    if row.reference_logprobs is not None and algorithm.kl_in == "reward":
        kl = row.logprobs.astype(np.float64) - row.reference_logprobs
    if algorithm.constraint != "none":
        share = -0.5 if target is COST else 0.5
    along = None if target is COST else row.rewards
    rewards = token_rewards(score, len(values), kl, algorithm.kl * share, along)
    return generalized_advantages(rewards, values.astype(np.float64), algorithm.gamma, algorithm.gae_lambda)


def set_token_advantages(
    rows: Sequence[MaskedRow], algorithm: AlgorithmConfig, kl: float, ranks: Ranks, multiplier: Multiplier | None = None
) -> None:
    """Sets the advantage of each token in the rows, where a critic or a KL in the reward makes them differ.

    kl: current coefficient of the KL. multiplier: price of costs, if any. With `normalize_std` the advantages of GAE
    are standardized over all response tokens of the batch, those of all `ranks`, which have rows of their own; stale
    ones too: masking re-weights nothing.
    """
    if algorithm.advantage == "gae":
        found = [token_advantages(item.row, algorithm) for item in rows]
        if multiplier is not None:
            pairs = zip(found, [token_advantages(item.row, algorithm, COST) for item in rows], strict=True)
            found = [constrained_advantages(of_reward, of_cost, multiplier.value) for of_reward, of_cost in pairs]
        mean = 0.0
        scale = 1.0
        if algorithm.normalize_std:
            mean, scale = _moments([each for item, each in zip(rows, found, strict=True) if item.counted], ranks)
        for item, advantages in zip(rows, found, strict=True):
            item.advantages = (advantages - mean) / scale
    elif kl > 0 and algorithm.kl_in == "reward":
        for item in rows:
            reference = item.row.reference_logprobs
            assert reference is not None, f"sample {item.row.key} has no reference log-probs"
            item.advantages = item.row.advantage - kl * kl_to_go(item.row.logprobs, reference)


def mean_cost(rows: Sequence[MaskedRow], ranks: Ranks) -> float:
    """Averages the cost over the samples of all ranks, masked samples included."""
    own = [sum(COST.of(item.row)[0] for item in rows), len(rows)]
    total, count = ranks.sum(torch.tensor(own, dtype=torch.float64)).tolist()
    return float(total / count)


def _moments(found: Sequence[Floats], ranks: Ranks) -> tuple[float, float]:
    """Returns mean and standard deviation (plus STD_EPSILON) over the tokens of all ranks."""
    flat = np.concatenate([np.zeros(0), *found])
    count, total = ranks.sum(torch.tensor([float(len(flat)), float(flat.sum())], dtype=torch.float64)).tolist()
    mean = total / max(1.0, count)
    (squares,) = ranks.sum(torch.tensor([float(((flat - mean) ** 2).sum())], dtype=torch.float64)).tolist()
    return mean, float(np.sqrt(squares / max(1.0, count - 1))) + STD_EPSILON
