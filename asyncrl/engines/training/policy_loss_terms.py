"""The policy loss of a micro-batch: combines the objectives that the config chooses into loss terms."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.engines.training.batch.masking import MaskedRow
from asyncrl.engines.training.batch.micro_batches import MicroBatch
from asyncrl.engines.training.ranks.rank_group import Ranks
from asyncrl.objectives import corrections, surrogate_losses
from asyncrl.objectives.kl import kl_loss
from asyncrl.objectives.ragged import Ragged
from asyncrl.objectives.surrogate_losses import SurrogateLoss, pushed_away


class LossTerms(NamedTuple):
    """Holds the terms of the loss, all [live tokens].

    policy, kl, entropy: terms with weights and coefficients; their sum is the loss. ratio, clipped: see SurrogateLoss.
    weight: of the correction, 0 for a token that it leaves out. log_weight: proximal - behaviour.
    """

    policy: Tensor
    kl: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor
    weight: Tensor
    log_weight: Tensor

    @property
    def loss(self) -> Tensor:
        return self.policy.sum() + self.kl.sum() + self.entropy.sum()


def broken_rows(terms: LossTerms, ragged: Ragged) -> list[int]:
    """Returns the rows with a term that is not finite; all of them when only the sum is not."""
    tokens = ragged.sum((~torch.isfinite(terms.policy + terms.kl + terms.entropy)).float()).tolist()
    return [row for row, broken in enumerate(tokens) if broken] or list(range(len(tokens)))


def second_moment_of(
    rows: Sequence[tuple[MaskedRow, NDArray[np.float32]]], algorithm: AlgorithmConfig, ranks: Ranks
) -> float:
    """Computes the bound of the squared log ratios of an update (M2PO) from the current log-probs of its rows."""
    squares = [torch.zeros(0, dtype=torch.float64)]
    for item, current in rows:
        log_ratio = torch.from_numpy((current - item.row.logprobs)[item.live].astype(np.float64))
        advantages = torch.from_numpy(np.broadcast_to(item.advantages, item.live.shape)[item.live])
        squares.append(log_ratio[pushed_away(log_ratio, advantages)].square())
    budget = algorithm.second_moment
    assert budget is not None, "the config requires second_moment with m2po"
    return surrogate_losses.second_moment_bound(torch.cat(squares), budget, ranks.sum, ranks.largest)


def policy_loss_terms(
    algorithm: AlgorithmConfig, kl: float, second_moment: float, current: Tensor, entropy: Tensor, batch: MicroBatch
) -> LossTerms:
    """Computes the loss terms from current log-probs and entropies of the live tokens, both with gradient. kl:
    coefficient of the KL term. second_moment: bound of the squared log ratios of this update (M2PO)."""
    proximal = current.detach() if batch.proximal is None else batch.proximal
    log_weight = proximal - batch.behaviour
    old = batch.behaviour if algorithm.old_logprobs == "engine" else proximal
    weight = _correction_weight(algorithm, log_weight, batch)
    surrogate = _surrogate_loss(algorithm, second_moment, surrogate_losses.log_ratio(current, old), current, batch)
    bonus = torch.zeros_like(batch.weights)
    if algorithm.entropy_bonus != 0:  # Tokens that a correction leaves out get no bonus.
        bonus = torch.where(weight > 0, -algorithm.entropy_bonus * batch.weights * entropy, 0.0)
    return LossTerms(
        policy=batch.weights * weight * surrogate.terms,
        kl=_kl_term(algorithm, kl, current, batch, surrogate.ratio, weight),
        entropy=bonus,
        ratio=surrogate.ratio,
        clipped=surrogate.clipped,
        weight=weight,
        log_weight=log_weight,
    )


def _correction_weight(algorithm: AlgorithmConfig, log_weight: Tensor, batch: MicroBatch) -> Tensor:
    """Returns the weight of each token: 1 or a correction for proximal / behaviour, and 0 where it is rejected."""
    weight = torch.ones_like(log_weight)
    cap = algorithm.weight_cap
    floor = algorithm.weight_floor
    if algorithm.old_logprobs != "engine" and algorithm.correction != "none":
        leveled = corrections.weight_at_level(log_weight, algorithm.correction_level, batch.ragged)
        assert cap is not None, "the config fills in a default"
        if algorithm.correction == "cap":
            weight = corrections.capped_weight(leveled, cap)
        else:
            assert floor is not None, "the config fills in a default"
            weight = corrections.masked_weight(leveled, floor, cap)
    if algorithm.rejection == "none":
        return weight
    low = algorithm.rejection_low or 0.0
    high = algorithm.rejection_high
    assert high is not None, "the config requires rejection_high with a rejection"
    kept = corrections.accepted(log_weight, batch.ragged, algorithm.rejection, low, high)
    return torch.where(kept, weight, 0.0)


def _surrogate_loss(
    algorithm: AlgorithmConfig, second_moment: float, log_ratio: Tensor, current: Tensor, batch: MicroBatch
) -> SurrogateLoss:
    low = algorithm.clip_low
    high = algorithm.clip_high
    ragged = batch.ragged
    advantages = batch.advantages
    match algorithm.loss:
        case "clip":
            return surrogate_losses.clipped_loss(log_ratio, advantages, low, high, algorithm.dual_clip)
        case "gspo":
            log_ratio = surrogate_losses.sequence_log_ratio(log_ratio, ragged)
            return surrogate_losses.clipped_loss(log_ratio, advantages, low, high)
        case "cispo":
            return surrogate_losses.clipped_weight_loss(log_ratio, current, advantages, low, high)
        case "gmpo":
            return surrogate_losses.geometric_mean_loss(log_ratio, advantages, ragged, low, high)
        case "m2po":
            moved = (current - batch.behaviour).detach()  # Unbounded, as those that `second_moment` was found from.
            kept = ~pushed_away(moved, advantages) | (moved.double().square() <= second_moment)
            return surrogate_losses.kept_ratio_loss(log_ratio, advantages, kept)
        case "sapo":
            assert algorithm.gate_temperatures is not None, "the config requires them with sapo"
            return surrogate_losses.soft_gate_loss(log_ratio, advantages, *algorithm.gate_temperatures)


def _kl_term(
    algorithm: AlgorithmConfig, kl: float, current: Tensor, batch: MicroBatch, ratio: Tensor, weight: Tensor
) -> Tensor:
    """Computes the KL term with the policy's weight: the clipped, detached ratio times the correction's weight."""
    if batch.reference is None or algorithm.kl_in == "reward":
        return torch.zeros_like(batch.weights)
    low = 1 - algorithm.clip_low
    high = 1 + algorithm.clip_high
    if algorithm.loss == "gmpo":  # GMPO clips the log ratio.
        low = math.exp(-algorithm.clip_low)
        high = math.exp(algorithm.clip_high)
    term = kl_loss(current, batch.reference, algorithm.kl_estimator, ratio.clamp(low, high) * weight)
    return kl * batch.weights * term
