"""The loss of a micro-batch: which of the objectives the experiment asks for, term by term."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config import Algorithm
from asyncrl.engines.training.microbatch import MicroBatch
from asyncrl.objectives import losses
from asyncrl.objectives.corrections import (
    Importance,
    accepted,
    against_engine,
    against_proximal,
    capped_weight,
    leveled,
    masked_weight,
)
from asyncrl.objectives.kl import kl_loss
from asyncrl.objectives.losses import Losses
from asyncrl.objectives.second_moment import pushed_away


@dataclass(frozen=True, slots=True)
class Strength:
    """What of the loss changes from step to step. kl: coefficient of the KL term now. second_moment: the bound of
    squared log ratios in this update."""

    kl: float
    second_moment: float = float("inf")


@dataclass(frozen=True, slots=True)
class Terms:
    """policy, kl, entropy: weighted terms of the loss [tokens], coefficient included; their sum is the loss.

    ratio, held: as the policy loss took them, see `Losses`; weight: of the correction, 0 for what it leaves out.
    log_weight: proximal - behaviour.
    """

    policy: Tensor
    kl: Tensor
    entropy: Tensor
    ratio: Tensor
    held: Tensor
    weight: Tensor
    log_weight: Tensor

    @property
    def tokens(self) -> Tensor:
        return self.policy + self.kl + self.entropy

    @property
    def loss(self) -> Tensor:
        return self.policy.sum() + self.kl.sum() + self.entropy.sum()


def terms_of(algorithm: Algorithm, strength: Strength, current: Tensor, entropy: Tensor, batch: MicroBatch) -> Terms:
    """current, entropy: log-probs of the live tokens and of their distributions, with gradient [tokens]."""
    proximal = current.detach() if batch.proximal is None else batch.proximal
    log_weight = proximal - batch.behaviour
    importance = _importance(algorithm, current, proximal, log_weight, batch)
    found = _losses(algorithm, strength, importance.log_ratio, current, batch)
    return Terms(
        policy=batch.weights * importance.weight * found.terms,
        kl=_kl_term(algorithm, strength, current, batch, found.ratio, importance.weight),
        entropy=_entropy_term(algorithm, entropy, batch, importance.weight),
        ratio=found.ratio,
        held=found.held,
        weight=importance.weight,
        log_weight=log_weight,
    )


def _entropy_term(algorithm: Algorithm, entropy: Tensor, batch: MicroBatch, weight: Tensor) -> Tensor:
    """What the correction leaves out has no bonus either."""
    if algorithm.entropy_bonus == 0:
        return torch.zeros_like(batch.weights)
    return torch.where(weight > 0, -algorithm.entropy_bonus * batch.weights * entropy, 0.0)


def _importance(
    algorithm: Algorithm, current: Tensor, proximal: Tensor, log_weight: Tensor, batch: MicroBatch
) -> Importance:
    if algorithm.old_logprobs == "engine":
        found = against_engine(current, batch.behaviour)
    else:
        found = against_proximal(current, proximal, _weight(algorithm, log_weight, batch))
    if algorithm.rejection == "none":
        return found
    low, high = algorithm.rejection_low or 0.0, algorithm.rejection_high
    assert high is not None, "the config needs it with a rejection"
    kept = accepted(log_weight, batch.rows, algorithm.rejection, low, high)
    return Importance(found.log_ratio, torch.where(kept, found.weight, 0.0))


def _weight(algorithm: Algorithm, log_weight: Tensor, batch: MicroBatch) -> Tensor:
    leveled_weight = leveled(log_weight, algorithm.correction_level, batch.rows)
    if algorithm.correction == "none":
        return torch.ones_like(log_weight)
    assert algorithm.weight_cap is not None, "the config has a default"
    if algorithm.correction == "cap":
        return capped_weight(leveled_weight, algorithm.weight_cap)
    assert algorithm.weight_floor is not None, "the config has a default"
    return masked_weight(leveled_weight, algorithm.weight_floor, algorithm.weight_cap)


def _losses(algorithm: Algorithm, strength: Strength, log_ratio: Tensor, current: Tensor, batch: MicroBatch) -> Losses:
    low, high, rows, advantages = algorithm.clip_low, algorithm.clip_high, batch.rows, batch.advantages
    match algorithm.loss:
        case "clip":
            return losses.clipped_loss(log_ratio, advantages, low, high, algorithm.dual_clip)
        case "gspo":
            return losses.clipped_loss(losses.sequence_log_ratio(log_ratio, rows), advantages, low, high)
        case "cispo":
            return losses.clipped_weight_loss(log_ratio, current, advantages, low, high)
        case "gmpo":
            return losses.geometric_mean_loss(log_ratio, advantages, rows, low, high)
        case "m2po":
            away = pushed_away(log_ratio.detach(), advantages)
            kept = ~away | (log_ratio.detach().double().square() <= strength.second_moment)
            return losses.kept_ratio_loss(log_ratio, advantages, kept)
        case "sapo":
            assert algorithm.gate_temperatures is not None, "the config needs them"
            return losses.soft_gate_loss(log_ratio, advantages, *algorithm.gate_temperatures)


def _kl_term(
    algorithm: Algorithm, strength: Strength, current: Tensor, batch: MicroBatch, ratio: Tensor, weight: Tensor
) -> Tensor:
    """The KL carries the policy's weight: the clipped ratio, detached, times the correction's weight."""
    if batch.reference is None or algorithm.kl_in == "reward":
        return torch.zeros_like(batch.weights)
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    if algorithm.loss == "gmpo":  # Its bounds are of the logarithm.
        low, high = math.exp(-algorithm.clip_low), math.exp(algorithm.clip_high)
    held = ratio.clamp(low, high)
    term = kl_loss(current, batch.reference, algorithm.kl_estimator, held * weight)
    return strength.kl * batch.weights * term
