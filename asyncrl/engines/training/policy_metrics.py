"""Metrics of a policy step, computed from sums and maxima over its live tokens.

docs/metrics.md says what they mean. `policy/logprob_difference_max` covers tokens that, like all earlier tokens of
their sample, the current weights sampled. `mismatch/` covers the importance weights w = proximal / behaviour, per token
and per sample as the product over its tokens, of live tokens whose proximal log-probs are known: all of them, or those
before the first update. Its quantiles are exact to 1 % and clamped to e^20.
"""

import math

import torch
from torch import Tensor

from asyncrl.engines.training.batch.micro_batches import MicroBatch
from asyncrl.engines.training.policy_loss_terms import LossTerms
from asyncrl.engines.training.ranks.rank_group import Ranks
from asyncrl.objectives.corrections import effective_sample_share
from asyncrl.objectives.ragged import Ragged

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
    tokens and, for each level of log w, those of moments (count, sum, squares, kl) and histogram."""

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
