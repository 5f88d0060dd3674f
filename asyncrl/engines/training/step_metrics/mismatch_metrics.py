"""How far the policy that sampled is from the one that trains, before any cap, mask or rejection.

Over live tokens whose proximal log-probs are known (all of them, or with one forward pass a step those before the first
update), w = proximal / behaviour per token, and per sample the product over its tokens:

mismatch/weight_p01, p10, p50, p90, p99, max and mismatch/sequence_weight_*: quantiles, exact to 1 %; beyond e^20 they
are given as that. mismatch/ess, mismatch/sequence_ess: effective share of tokens and of samples. mismatch/kl:
k3 estimate of KL(behaviour || proximal) per token, w - 1 - log w: never negative, of little variance.
"""

import math

import torch
from torch import Tensor

from asyncrl.engines.training.ranks import Ranks
from asyncrl.objectives.corrections import effective_sample_share
from asyncrl.objectives.rows import Rows

WIDTH, REACH = 0.01, 20.0
BINS = 2 * round(REACH / WIDTH) + 1
"""Of a histogram of log w: it can be summed over micro-batches and ranks, where quantiles cannot."""
QUANTILES = {"p01": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
LEVELS = ("weight", "sequence_weight")
SUMS = ("count", "total", "squares", "kl")


class Mismatch:
    """Sums of one step, float64, kept on the device until it is over."""

    def __init__(self, device: torch.device) -> None:
        self._bins = torch.zeros(len(LEVELS), BINS, dtype=torch.float64, device=device)
        self._sums = torch.zeros(len(LEVELS), len(SUMS), dtype=torch.float64, device=device)
        self._largest = torch.full((len(LEVELS),), -REACH, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, log_weight: Tensor, rows: Rows) -> None:
        """log_weight: proximal - behaviour [tokens]."""
        for level, values in enumerate((log_weight, rows.sum(log_weight)[rows.lengths > 0])):
            logs = values.double().clamp(-REACH, REACH)
            places = ((logs + REACH) / WIDTH).round().long()
            self._bins[level] += torch.bincount(places, minlength=BINS)
            weights = logs.exp()
            added = torch.ones_like(logs), weights, weights.square(), weights - 1 - logs
            self._sums[level] += torch.stack([column.sum() for column in added])
            if len(logs):
                self._largest[level] = torch.maximum(self._largest[level], logs.max())

    def merge(self, other: "Mismatch") -> None:
        self._bins += other._bins
        self._sums += other._sums
        self._largest = torch.maximum(self._largest, other._largest)

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Over all ranks; nothing when no token was seen."""
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
    """The value up to which `share` of the counted ones lie."""
    place = int(torch.searchsorted(bins.cumsum(0), torch.tensor(share * count, dtype=bins.dtype, device=bins.device)))
    return math.exp(min(place, BINS - 1) * WIDTH - REACH)
