"""Masks response tokens out of the loss, and counts them. This module alone enforces the staleness limit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.training.batch.train_rows import TrainRow
from asyncrl.protocols.messages import LEFT_OUT, TrainedSample
from asyncrl.protocols.staleness import Policy, live

SHOWN_DIGITS = 4
"""Decimal digits of numbers that are shown."""


@dataclass(slots=True)
class MaskedRow:
    """Holds a row with its mask, and what the step adds to it; arrays are [tokens].

    live: True for tokens that may enter the loss; `live_tokens` counts them. counted: the row enters the denominators
    of the loss. staleness: in versions. The step of the policy sets advantages (what the loss multiplies each token
    with), weight (of each token in the loss of its update), proximal (log-probs at the start of the step) and rejected
    (live tokens that a correction gave the weight 0); that of a critic sets returns. Both set in_loss, tokens in a loss
    whose gradient was computed, and, where the update of the row was not taken, why: lost.
    """

    row: TrainRow
    live: NDArray[np.bool_]
    counted: bool
    staleness: NDArray[np.int64]
    advantages: float | NDArray[np.float64] = 0.0
    returns: float | NDArray[np.float64] = 0.0
    weight: float = 0.0
    proximal: NDArray[np.float32] | None = None
    rejected: int = 0
    in_loss: int = 0
    lost: str = ""

    @property
    def live_tokens(self) -> int:
        return int(self.live.sum())

    @property
    def trained(self) -> int:
        """Returns the tokens that entered the loss of an update that was taken; 0 before that update."""
        return 0 if self.lost else self.in_loss

    @property
    def tokens(self) -> int:
        return len(self.row.prompt_ids) + len(self.row.response_ids)

    def report(self) -> TrainedSample:
        """Returns what the step did with the response tokens, after its last update."""
        tokens = len(self.live)
        live = self.live_tokens
        reason = "truncated" if not self.counted else "stale" if live < tokens else ""
        account = TrainedSample(*self.row.key, self.trained, tokens - live, reason, self.rejected)
        if live and (self.lost or not self.in_loss + self.rejected):
            account = TrainedSample(*self.row.key, 0, tokens, self.lost or LEFT_OUT)
        if not self.row.is_shown:
            return account
        return replace(account, advantages=_shown(self.advantages), rewards=_shown(self.row.rewards))


def _shown(numbers: float | NDArray[np.float64] | None) -> tuple[float, ...]:
    """Returns the number of each token; () where all have the same."""
    if not isinstance(numbers, np.ndarray):
        return ()
    return tuple(round(number, SHOWN_DIGITS) for number in numbers.tolist())


def mask_rows(
    rows: Sequence[TrainRow], incarnation: int, version: int, limit: int, policy: Policy, mask_truncated: bool
) -> list[MaskedRow]:
    """Masks every token of another incarnation or of a version older than `version - limit`; `admit` has no limit. With
    `mask_truncated` a truncated row leaves the loss and its denominators; a stale token only loses its loss term."""
    masked = []
    for row in rows:
        fresh = np.ones(len(row.versions), np.bool_) if policy == "admit" else live(row.versions, version, limit)
        counted = not (mask_truncated and row.truncated)
        is_live = fresh & (row.incarnation == incarnation) & counted
        masked.append(MaskedRow(row, is_live, counted, version - row.versions, row.advantage))
    return masked


def mask_counts(rows: Sequence[MaskedRow]) -> Tensor:
    """Counts response tokens, float64 [4]: all, live, masked as stale, left out as truncated."""
    counts = torch.zeros(4, dtype=torch.float64)
    for row in rows:
        tokens = len(row.live)
        live = row.live_tokens
        stale, truncated = (tokens - live, 0) if row.counted else (0, tokens)
        counts += torch.tensor([tokens, live, stale, truncated], dtype=torch.float64)
    return counts


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
