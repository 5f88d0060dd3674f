"""Counts of response tokens by what masked them, the metrics of these counts, and why a step trained nothing.

mask/stale_fraction, mask/truncated_fraction: shares of all response tokens. staleness/masked_fraction: equals
mask/stale_fraction. tokens/response: number of response tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.engines.training.batch.masking import MaskedRow


def mask_counts(rows: Sequence[MaskedRow]) -> Tensor:
    """Counts response tokens, float64 [4]: all, live, masked as stale, left out as truncated."""
    counts = torch.zeros(4, dtype=torch.float64)
    for row in rows:
        tokens = len(row.live)
        stale = tokens - row.trained if row.counted else 0
        counts += torch.tensor([tokens, row.trained, stale, 0 if row.counted else tokens], dtype=torch.float64)
    return counts


def why_nothing_trained(counts: Tensor) -> str:
    """Returns the reason for a step without an update, given `mask_counts` summed over all ranks."""
    _, trained, stale, _ = counts.tolist()
    if trained > 0:
        return "not finite"
    return "stale" if stale > 0 else "truncated"


def mask_metrics(counts: Tensor) -> dict[str, float]:
    """Returns the metrics of `mask_counts` summed over all ranks, for a step that has trained nothing so far."""
    tokens, _, stale, truncated = counts.tolist()
    return {
        "tokens/response": tokens,
        "tokens/trained": 0.0,
        "staleness/masked_fraction": stale / max(1, tokens),
        "mask/stale_fraction": stale / max(1, tokens),
        "mask/truncated_fraction": truncated / max(1, tokens),
    }
