"""Metrics of a step from sums over its live tokens.

loss/policy, loss/kl, loss/entropy: the loss's parts, mean over updates.

Over live tokens: policy/entropy; policy/ratio_mean, ratio_max: the loss's ratio before the clip; policy/clip_frac:
where a bound of the loss removed the gradient or, with cispo, changed the weight; policy/ess: effective share of
samples under current / behaviour, before any cap; policy/weight_mean: of the correction's weight;
policy/kl_reference: mean of current - reference, the k1 estimate of the KL, with a reference only;
mask/rejected_fraction: share that a correction left out.
Before the first update: policy/kl_rollout_train: mean of behaviour - current, the k1 estimate of
KL(behaviour || current); policy/logprob_difference_max: largest |current - behaviour|, engine against trainer, of
tokens that the very weights that now train sampled, and all before them in their sample; left out when there is none.

staleness/mean, max: versions; staleness/updates_max: the same in optimizer steps, at most. mask/*_fraction: shares
of all response tokens by reason. tokens/response: count; tokens/trained: those that updates learnt from, without
what a correction left out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.engines.training.masking import Masked
from asyncrl.engines.training.microbatch import MicroBatch
from asyncrl.engines.training.mismatch import Mismatch
from asyncrl.engines.training.objective import Terms
from asyncrl.engines.training.ranks import Ranks
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


class Totals:
    """Sums and maxima over live tokens, float64, kept on the device until the step is over."""

    def __init__(self, device: torch.device) -> None:
        self.mismatch = Mismatch(device)
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.largest = torch.full((len(LARGEST),), -1.0, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, terms: Terms, current: Tensor, entropy: Tensor, batch: MicroBatch, first: bool) -> None:
        """first: no optimizer step was taken yet in this iteration."""
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
            terms.held,
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
            self.mismatch.add(terms.log_weight, batch.rows)

    def merge(self, other: "Totals") -> None:
        self.sums += other.sums
        self.largest = torch.maximum(self.largest, other.largest)
        self.mismatch.merge(other.mismatch)

    def reduce(self, ranks: Ranks) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over all ranks, by name."""
        sums = ranks.sum(self.sums).tolist()
        largest = ranks.largest(self.largest).tolist()
        return dict(zip(SUMS, sums, strict=True)), dict(zip(LARGEST, largest, strict=True))


def policy_metrics(
    sums: dict[str, float], largest: dict[str, float], updates: int, planned: int, *, reference: bool
) -> dict[str, float]:
    """planned: updates the batch was split over, of which `updates` were taken. reference: there is one."""
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


def mask_counts(rows: Sequence[Masked]) -> Tensor:
    """float64 [4]: response tokens, trained, masked as stale, left out as truncated."""
    counts = torch.zeros(4, dtype=torch.float64)
    for row in rows:
        tokens = len(row.live)
        stale = tokens - row.trained if row.counted else 0
        counts += torch.tensor([tokens, row.trained, stale, 0 if row.counted else tokens], dtype=torch.float64)
    return counts


def why_nothing_trained(counts: Tensor) -> str:
    """counts: the sum of `mask_counts` over all ranks."""
    _, trained, stale, _ = counts.tolist()
    if trained > 0:
        return "not finite"
    return "stale" if stale > 0 else "truncated"


def mask_metrics(counts: Tensor) -> dict[str, float]:
    """From the sum of `mask_counts` over all ranks; of a step without an update, which trained nothing."""
    tokens, _, stale, truncated = counts.tolist()
    return {
        "tokens/response": tokens,
        "tokens/trained": 0.0,
        "staleness/masked_fraction": stale / max(1, tokens),
        "mask/stale_fraction": stale / max(1, tokens),
        "mask/truncated_fraction": truncated / max(1, tokens),
    }
