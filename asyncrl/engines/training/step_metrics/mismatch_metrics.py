"""Metrics of the mismatch between the policy that sampled and the policy that trains, before any correction.

The importance weight w = proximal / behaviour is taken per token, and per sample as the product over its tokens. It
covers live tokens whose proximal log-probs are known: all of them, or, when the step computes current log-probs only,
those before the first update.

- mismatch/weight_p01, p10, p50, p90, p99, max and mismatch/sequence_weight_*: quantiles, exact to 1 %, clamped to e^20.
- mismatch/ess, mismatch/sequence_ess: effective sample size as a share of tokens and of samples.
- mismatch/kl: mean of w - 1 - log w, the k3 estimate of KL(behaviour || proximal) per token, never negative.
"""

import math

import torch
from torch import Tensor

from asyncrl.engines.training.state.data_parallel import Ranks
from asyncrl.objectives.corrections import effective_sample_share
from asyncrl.objectives.ragged import Ragged

WIDTH, REACH = 0.01, 20.0
BINS = 2 * round(REACH / WIDTH) + 1
"""Bins of a histogram of log w. Unlike quantiles, histograms can be summed over micro-batches and ranks."""
QUANTILES = {"p01": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
LEVELS = ("weight", "sequence_weight")
SUMS = ("count", "total", "squares", "kl")


class MismatchSums:
    """Sums histograms and moments of log w over one step, in float64 on the device."""

    def __init__(self, device: torch.device) -> None:
        self._bins = torch.zeros(len(LEVELS), BINS, dtype=torch.float64, device=device)
        self._sums = torch.zeros(len(LEVELS), len(SUMS), dtype=torch.float64, device=device)
        self._largest = torch.full((len(LEVELS),), -REACH, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, log_weight: Tensor, ragged: Ragged) -> None:
        """Adds the tokens of a micro-batch. log_weight: proximal - behaviour [tokens]."""
        for level, values in enumerate((log_weight, ragged.sum(log_weight)[ragged.lengths > 0])):
            logs = values.double().clamp(-REACH, REACH)
            places = ((logs + REACH) / WIDTH).round().long()
            self._bins[level] += torch.bincount(places, minlength=BINS)
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
