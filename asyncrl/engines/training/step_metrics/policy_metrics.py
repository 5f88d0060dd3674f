"""Metrics of a policy step, computed from sums over its live tokens.

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
"""

import torch
from torch import Tensor

from asyncrl.engines.training.batch.microbatch import MicroBatch
from asyncrl.engines.training.loss.policy_loss import LossTerms
from asyncrl.engines.training.state.data_parallel import Ranks
from asyncrl.engines.training.step_metrics.mismatch_metrics import MismatchSums
from asyncrl.objectives.corrections import effective_sample_share

SUMS = (
    "tokens",
    "policy",
    "kl",
    "bonus",
    "entropy",
    "ratio",
    "clipped",
    "share",
    "share_squares",
    "unmoved",
    "divergence",
    "weight",
    "rejected",
    "reference",
    "staleness",
)
LARGEST = ("ratio", "staleness", "difference")


class PolicyTotals:
    """Holds sums and maxima over live tokens, float64, on the device until the step is over."""

    def __init__(self, device: torch.device) -> None:
        self.mismatch = MismatchSums(device)
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.largest = torch.full((len(LARGEST),), -1.0, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, terms: LossTerms, current: Tensor, entropy: Tensor, batch: MicroBatch, first: bool) -> None:
        """Adds a micro-batch. first: no optimizer step has been taken in this iteration."""
        ratio = terms.ratio
        difference = current - batch.behaviour
        share = difference.exp()
        unmoved = torch.full_like(ratio, float(first))
        columns = (
            torch.ones_like(ratio),
            terms.policy,
            terms.kl,
            terms.entropy,
            entropy,
            ratio,
            terms.clipped,
            share,
            share.square(),
            unmoved,
            -difference * unmoved,
            terms.weight,
            terms.weight == 0,
            torch.zeros_like(ratio) if batch.reference is None else current - batch.reference,
            batch.staleness,
        )
        self.sums += torch.stack([column.double().sum() for column in columns])
        fresh = difference.abs()[batch.fresh > 0] if first else difference[:0]
        values = (ratio, batch.staleness, fresh)
        peaks = torch.stack([v.double().max() if len(v) else self.largest.new_tensor(-1.0) for v in values])
        self.largest = torch.maximum(self.largest, peaks)
        if first or batch.proximal is not None:
            self.mismatch.add(terms.log_weight, batch.ragged)

    def merge(self, other: "PolicyTotals") -> None:
        self.sums += other.sums
        self.largest = torch.maximum(self.largest, other.largest)
        self.mismatch.merge(other.mismatch)

    def reduce(self, ranks: Ranks) -> tuple[dict[str, float], dict[str, float]]:
        """Returns sums and maxima over all ranks by name."""
        sums = ranks.sum(self.sums).tolist()
        largest = ranks.largest(self.largest).tolist()
        return dict(zip(SUMS, sums, strict=True)), dict(zip(LARGEST, largest, strict=True))


def policy_metrics(
    sums: dict[str, float], largest: dict[str, float], updates: int, planned: int, *, reference: bool
) -> dict[str, float]:
    """Returns the metrics of a step that took `updates` of the `planned` updates. reference: the loss has one."""
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
    return metrics
