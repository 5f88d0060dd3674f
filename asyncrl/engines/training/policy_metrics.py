"""Metrics of a policy step, computed from sums and maxima over its live tokens.

- loss/policy, loss/kl, loss/entropy: parts of the loss, mean over updates.

Over live tokens:
- policy/entropy; policy/ratio_mean, policy/ratio_max: the ratio of the loss before the clip.
- policy/clip_frac: share where a bound removed the gradient or, with cispo, changed the weight.
- policy/ess: effective sample size of current / behaviour as a share, before any cap.
- policy/weight_mean: weight of the correction; mask/rejected_fraction: share that the correction left out.
- policy/kl_reference: mean of current - reference, the k1 estimate of the KL, only with a reference.
- staleness/mean, staleness/max: in versions; staleness/updates_max: upper bound in optimizer steps.
- tokens/trained: number of live tokens without those that a correction left out.

Before the first update:
- policy/kl_rollout_train: mean of behaviour - current, the k1 estimate of KL(behaviour || current).
- policy/logprob_difference_max: largest |current - behaviour|, engine against trainer. It covers tokens that, like all
  earlier tokens of their sample, the current weights sampled, and is absent when there is no such token.

Mismatch of the policy that sampled and the policy that trains, before any correction. The importance weight
w = proximal / behaviour is taken per token, and per sample as the product over its tokens. It covers live tokens whose
proximal log-probs are known: all of them, or, when the step computes current log-probs only, those before the first
update.
- mismatch/weight_p01, p10, p50, p90, p99, max and mismatch/sequence_weight_*: quantiles, exact to 1 %, clamped to e^20.
- mismatch/ess, mismatch/sequence_ess: effective sample size as a share of tokens and of samples.
- mismatch/kl: mean of w - 1 - log w, the k3 estimate of KL(behaviour || proximal) per token, never negative.
"""

import math

import torch
from torch import Tensor

from asyncrl.engines.training.batch.micro_batches import MicroBatch
from asyncrl.engines.training.data_parallel import Ranks
from asyncrl.engines.training.policy_loss_terms import LossTerms
from asyncrl.objectives.corrections import effective_sample_share
from asyncrl.objectives.ragged import Ragged

TERM_SUMS = ("policy", "kl", "bonus", "ratio", "clipped", "weight", "rejected")
TOKEN_SUMS = ("tokens", "entropy", "share", "share_squares", "unmoved", "divergence", "reference", "staleness")
LARGEST = ("ratio", "staleness", "difference")

WIDTH, REACH = 0.01, 20.0
BINS = 2 * round(REACH / WIDTH) + 1
"""Bins of a histogram of log w. Unlike quantiles, histograms can be summed over micro-batches and ranks."""
QUANTILES = {"p01": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
LEVELS = ("weight", "sequence_weight")


class MismatchSums:
    """Sums histograms and moments (count, sum, squares, kl) of log w, in float64 on the device."""

    def __init__(self, device: torch.device) -> None:
        self._bins = torch.zeros(len(LEVELS), BINS, dtype=torch.float64, device=device)
        self._sums = torch.zeros(len(LEVELS), 4, dtype=torch.float64, device=device)
        self._largest = torch.full((len(LEVELS),), -REACH, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, log_weight: Tensor, ragged: Ragged) -> None:
        """Adds the tokens of a micro-batch. log_weight: proximal - behaviour [tokens]."""
        for level, values in enumerate((log_weight, ragged.sum(log_weight)[ragged.lengths > 0])):
            logs = values.double().clamp(-REACH, REACH)
            self._bins[level] += torch.bincount(((logs + REACH) / WIDTH).round().long(), minlength=BINS)
            weights = logs.exp()
            added = torch.ones_like(logs), weights, weights.square(), weights - 1 - logs
            self._sums[level] += torch.stack([column.sum() for column in added])
            if len(logs):
                self._largest[level] = torch.maximum(self._largest[level], logs.max())

    def merge(self, other: "MismatchSums") -> None:
        self._bins += other._bins
        self._sums += other._sums
        self._largest = torch.maximum(self._largest, other._largest)

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Returns the metrics over all ranks, or none when no token was added."""
        bins, sums, largest = ranks.sum(self._bins), ranks.sum(self._sums), ranks.largest(self._largest)
        found: dict[str, float] = {}
        if sums[0, 0] == 0:
            return found
        for level, name in enumerate(LEVELS):
            count, total, squares, kl = sums[level].tolist()
            found |= {f"mismatch/{name}_{q}": _quantile(bins[level], count, share) for q, share in QUANTILES.items()}
            found[f"mismatch/{name}_max"] = math.exp(largest[level].item())
            found[f"mismatch/{name.replace('weight', 'ess')}"] = effective_sample_share(total, squares, count)
            if name == "weight":
                found["mismatch/kl"] = kl / count
        return found


def _quantile(bins: Tensor, count: float, share: float) -> float:
    """Returns the weight below which `share` of the counted weights lie."""
    place = int(torch.searchsorted(bins.cumsum(0), torch.tensor(share * count, dtype=bins.dtype, device=bins.device)))
    return math.exp(min(place, BINS - 1) * WIDTH - REACH)


class PolicyTotals:
    """Holds sums and maxima over live tokens, float64, on the device until the step is over."""

    def __init__(self, device: torch.device) -> None:
        self._mismatch = MismatchSums(device)
        self._sums = torch.zeros(len(TERM_SUMS + TOKEN_SUMS), dtype=torch.float64, device=device)
        self._largest = torch.full((len(LARGEST),), -1.0, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, terms: LossTerms, current: Tensor, entropy: Tensor, batch: MicroBatch, first: bool) -> None:
        """Adds a micro-batch. first: no optimizer step has been taken in this iteration."""
        difference = current - batch.behaviour
        share, unmoved = difference.exp(), torch.full_like(difference, float(first))
        reference = torch.zeros_like(current) if batch.reference is None else current - batch.reference
        of_terms = (terms.policy, terms.kl, terms.entropy, terms.ratio, terms.clipped, terms.weight, terms.weight == 0)
        of_tokens = (torch.ones_like(current), entropy, share, share.square(), unmoved, -difference * unmoved)
        columns = (*of_terms, *of_tokens, reference, batch.staleness)
        self._sums += torch.stack([column.double().sum() for column in columns])
        fresh = difference.abs()[batch.fresh > 0] if first else difference[:0]
        values = (terms.ratio, batch.staleness, fresh)
        peaks = torch.stack([v.double().max() if len(v) else self._largest.new_tensor(-1.0) for v in values])
        self._largest = torch.maximum(self._largest, peaks)
        if first or batch.proximal is not None:
            self._mismatch.add(terms.log_weight, batch.ragged)

    def merge(self, other: "PolicyTotals") -> None:
        self._sums += other._sums
        self._largest = torch.maximum(self._largest, other._largest)
        self._mismatch.merge(other._mismatch)

    def metrics(self, ranks: Ranks, updates: int, planned: int, *, reference: bool) -> dict[str, float]:
        """Returns the metrics of a step that took `updates` of the `planned` updates. reference: the loss has one."""
        sums = dict(zip(TERM_SUMS + TOKEN_SUMS, ranks.sum(self._sums).tolist(), strict=True))
        largest = dict(zip(LARGEST, ranks.largest(self._largest).tolist(), strict=True))
        mismatch, tokens = self._mismatch.metrics(ranks), sums["tokens"]
        if updates == 0:
            return {}
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
        return metrics | mismatch
