"""The loss of a micro-batch: which of the objectives the experiment asks for, term by term."""

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config import Algorithm
from asyncrl.engines.training.microbatch import MicroBatch
from asyncrl.objectives.corrections import Importance, against_engine, against_proximal
from asyncrl.objectives.kl import kl_loss, kl_shaped_advantages
from asyncrl.objectives.losses import clipped_policy_loss

WEIGHT_CAP = 2.0


@dataclass(frozen=True, slots=True)
class Terms:
    """policy, kl: weighted terms of the loss [tokens], coefficient included; their sum is the loss.

    importance and advantages: what the policy term was computed with.
    """

    policy: Tensor
    kl: Tensor
    importance: Importance
    advantages: Tensor

    @property
    def loss(self) -> Tensor:
        return self.policy.sum() + self.kl.sum()


def terms_of(algorithm: Algorithm, current: Tensor, batch: MicroBatch) -> Terms:
    """current: log-probs of the live tokens, with gradient [tokens]."""
    importance = _importance(algorithm, current, batch)
    advantages = _advantages(algorithm, current, batch)
    policy = clipped_policy_loss(importance.log_ratio, advantages, algorithm.clip_low, algorithm.clip_high)
    return Terms(
        batch.weights * importance.weight * policy,
        _kl_term(algorithm, current, batch, importance),
        importance,
        advantages,
    )


def _importance(algorithm: Algorithm, current: Tensor, batch: MicroBatch) -> Importance:
    if algorithm.old_logprobs == "engine":
        return against_engine(current, batch.behaviour)
    proximal = current.detach() if batch.proximal is None else batch.proximal
    return against_proximal(current, proximal, batch.behaviour, algorithm.weight_cap or WEIGHT_CAP)


def _advantages(algorithm: Algorithm, current: Tensor, batch: MicroBatch) -> Tensor:
    if batch.reference is None or algorithm.kl_in == "loss":
        return batch.advantages
    return kl_shaped_advantages(batch.advantages, current, batch.reference, algorithm.kl)


def _kl_term(algorithm: Algorithm, current: Tensor, batch: MicroBatch, importance: Importance) -> Tensor:
    """The KL carries the policy's weight: the clipped ratio, detached, times the correction's weight."""
    if batch.reference is None or algorithm.kl_in == "reward":
        return torch.zeros_like(batch.weights)
    ratio = importance.log_ratio.detach().exp().clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    term = kl_loss(current, batch.reference, algorithm.kl_estimator, ratio * importance.weight)
    return algorithm.kl * batch.weights * term
