"""The policy loss of a micro-batch: the advantage of each token, the terms that the config chooses, and their metrics.

set_token_advantages ──> advantages ── policy_loss_terms ──> LossTerms ── PolicyTotals ──> metrics of the step
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.engines.ranks.rank_mesh import Ranks
from asyncrl.engines.training.micro_batches import MaskedRow, MicroBatch
from asyncrl.engines.training.train_rows import COST, REWARD, TrainRow, ValueTarget
from asyncrl.objectives import corrections, losses
from asyncrl.objectives.advantages import (
    STD_EPSILON,
    Multiplier,
    constrained_advantages,
    generalized_advantages,
    token_rewards,
)
from asyncrl.objectives.corrections import effective_sample_share
from asyncrl.objectives.kl import kl_loss, kl_to_go
from asyncrl.objectives.losses import LOSSES, LossInputs, pushed_away
from asyncrl.objectives.ragged import Ragged

# Token advantages: GAE from a critic's values, the KL penalty in the reward, and costs under a multiplier.


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
    return losses.second_moment_bound(torch.cat(squares), budget, ranks.sum, ranks.largest)


def policy_loss_terms(
    algorithm: AlgorithmConfig, kl: float, second_moment: float, current: Tensor, entropy: Tensor, batch: MicroBatch
) -> LossTerms:
    """Computes the loss terms from current log-probs and entropies of the live tokens, both with gradient. kl:
    coefficient of the KL term. second_moment: bound of the squared log ratios of this update (M2PO)."""
    proximal = current.detach() if batch.proximal is None else batch.proximal
    log_weight = proximal - batch.behaviour
    old = batch.behaviour if algorithm.old_logprobs == "engine" else proximal
    weight = _correction_weight(algorithm, log_weight, batch)
    inputs = LossInputs(
        losses.log_ratio(current, old),
        current,
        batch.behaviour,
        batch.advantages,
        batch.ragged,
        (algorithm.clip_low, algorithm.clip_high),
        algorithm.dual_clip,
        algorithm.gate_temperatures,
        second_moment,
    )
    surrogate = LOSSES[algorithm.loss](inputs)
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


# Metrics of a policy step, computed from sums and maxima over its live tokens.
#
# docs/metrics.md says what they mean. `policy/logprob_difference_max` covers tokens that, like all earlier tokens of
# their sample, the current weights sampled. `mismatch/` covers the importance weights w = proximal / behaviour, per
# token and per sample as the product over its tokens, of live tokens whose proximal log-probs are known: all of them,
# or those before the first update. Its quantiles are exact to 1 % and clamped to e^20.


TERM_SUMS = ("policy", "kl", "bonus", "ratio", "clipped", "weight", "rejected")
TOKEN_SUMS = ("tokens", "entropy", "share", "share_squares", "unmoved", "divergence", "reference", "staleness")
LEVELS = ("weight", "sequence_weight")
LARGEST = ("ratio", "staleness", "difference", *LEVELS)

WIDTH = 0.01
REACH = 20.0
BINS = 2 * round(REACH / WIDTH) + 1
"""Bins of a histogram of log w. Unlike quantiles, histograms can be summed over micro-batches and ranks."""
QUANTILES = {"p01": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}


class PolicyTotals:
    """Holds sums and maxima over live tokens, float64, on the device until the step is over. The sums are those of
    tokens and, for each level of log w, those of moments (count, sum, squares, kl) and histogram. PolicyStep has one of
    the whole step, into which that of each update goes once the update was taken."""

    def __init__(self, device: torch.device) -> None:
        shapes = [(len(TERM_SUMS + TOKEN_SUMS),), (len(LEVELS), 4), (len(LEVELS), BINS)]
        self._sums = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes]
        self._largest = torch.full((len(LARGEST),), -REACH, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, terms: LossTerms, current: Tensor, entropy: Tensor, batch: MicroBatch, first: bool) -> None:
        """Adds a micro-batch. first: no optimizer step has been taken in this iteration."""
        difference = current - batch.behaviour
        share = difference.clamp(-REACH, REACH).exp()
        unmoved = torch.full_like(difference, float(first))
        reference = torch.zeros_like(current) if batch.reference is None else current - batch.reference
        of_terms = (terms.policy, terms.kl, terms.entropy, terms.ratio, terms.clipped, terms.weight, terms.weight == 0)
        of_tokens = (torch.ones_like(current), entropy, share, share.square(), unmoved, -difference * unmoved)
        columns = (*of_terms, *of_tokens, reference, batch.staleness)
        self._sums[0] += torch.stack([column.double().sum() for column in columns])
        fresh = difference.abs()[batch.fresh > 0] if first else difference[:0]
        for place, values in enumerate((terms.ratio, batch.staleness, fresh)):
            self._raise_largest(place, values.double())
        if first or batch.proximal is not None:
            self.add_mismatch(terms.log_weight, batch.ragged)

    def add_mismatch(self, log_weight: Tensor, ragged: Ragged) -> None:
        """Adds the importance weights of a micro-batch. log_weight: proximal - behaviour [tokens]."""
        for level, values in enumerate((log_weight, ragged.sum(log_weight)[ragged.lengths > 0])):
            logs = values.double().clamp(-REACH, REACH)
            weights = logs.exp()
            moments = torch.ones_like(logs), weights, weights.square(), weights - 1 - logs
            self._sums[1][level] += torch.stack([column.sum() for column in moments])
            self._sums[2][level] += torch.bincount(((logs + REACH) / WIDTH).round().long(), minlength=BINS)
            self._raise_largest(LARGEST.index(LEVELS[level]), logs)

    def _raise_largest(self, place: int, values: Tensor) -> None:
        if len(values):
            self._largest[place] = torch.maximum(self._largest[place], values.max())

    def merge(self, other: "PolicyTotals") -> None:
        for own, others in zip(self._sums, other._sums, strict=True):
            own += others
        self._largest = torch.maximum(self._largest, other._largest)

    def share(self, stages: Ranks) -> None:
        """Takes the sums and maxima of the last stage of a pipeline, which alone added micro-batches."""
        self._sums = [stages.shared(each, stages.size - 1) for each in self._sums]
        self._largest = stages.shared(self._largest, stages.size - 1)

    def metrics(self, ranks: Ranks, updates: int, planned: int, *, reference: bool) -> dict[str, float]:
        """Returns the metrics of a step that took `updates` of the `planned` updates. reference: the loss has one."""
        totals, moments, bins = (ranks.sum(each) for each in self._sums)
        sums = dict(zip(TERM_SUMS + TOKEN_SUMS, totals.tolist(), strict=True))
        largest = dict(zip(LARGEST, ranks.largest(self._largest).tolist(), strict=True))
        if updates == 0:
            return {}
        tokens = sums["tokens"]
        metrics = {
            "loss/policy": sums["policy"] / updates,
            "loss/kl": sums["kl"] / updates,
            "loss/entropy": sums["bonus"] / updates,
            "policy/entropy": sums["entropy"] / tokens,
            "policy/ratio_mean": sums["ratio"] / tokens,
            "policy/ratio_max": largest["ratio"],
            "policy/clip_frac": sums["clipped"] / tokens,
            "policy/ess": effective_sample_share(sums["share"], sums["share_squares"], tokens),
            "policy/weight_mean": sums["weight"] / tokens,
            "mask/rejected_fraction": sums["rejected"] / tokens,
            "tokens/trained": tokens - sums["rejected"],
            "staleness/mean": sums["staleness"] / tokens,
            "staleness/max": largest["staleness"],
            "staleness/updates_max": largest["staleness"] * planned + updates - 1,
        }
        if reference:
            metrics["policy/kl_reference"] = sums["reference"] / tokens
        if sums["unmoved"]:
            metrics["policy/kl_rollout_train"] = sums["divergence"] / sums["unmoved"]
        if largest["difference"] >= 0:
            metrics["policy/logprob_difference_max"] = largest["difference"]
        return metrics | mismatch_metrics(moments, bins, largest)


def mismatch_metrics(moments: Tensor, bins: Tensor, largest: dict[str, float]) -> dict[str, float]:
    """Returns the metrics of the importance weights, or none when no token was added."""
    found: dict[str, float] = {}
    for level, name in enumerate(LEVELS):
        count, total, squares, kl = moments[level].tolist()
        if count == 0:
            return {}
        below = bins[level].cumsum(0)
        for quantile, share in QUANTILES.items():
            place = int(torch.searchsorted(below, below.new_tensor(share * count)))
            found[f"mismatch/{name}_{quantile}"] = math.exp(min(place, BINS - 1) * WIDTH - REACH)
        found[f"mismatch/{name}_max"] = math.exp(largest[name])
        found[f"mismatch/{name.replace('weight', 'ess')}"] = effective_sample_share(total, squares, count)
        if name == "weight":
            found["mismatch/kl"] = kl / count
    return found
