"""Masks response tokens out of the loss. This module is the only place that enforces the staleness limit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.training.interface import SampleTokenCounts, TrainRow
from asyncrl.protocols.staleness import Policy, live


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """Holds a row with the mask and the staleness of its response tokens.

    live: bool [tokens], True for tokens that enter the loss. counted: the row enters the denominators of the loss.
    """

    row: TrainRow
    live: NDArray[np.bool_]
    counted: bool
    staleness: NDArray[np.int64]

    @property
    def trained(self) -> int:
        """Counts the live tokens."""
        return int(self.live.sum())

    @property
    def tokens(self) -> int:
        """Counts the tokens of prompt and response."""
        return len(self.row.prompt_ids) + len(self.row.response_ids)

    def token_counts(self, lost: str = "", rejected: int = 0) -> SampleTokenCounts:
        """Counts what happened to the response tokens.

        lost: why no live token trained, "" if they did. rejected: live tokens that a correction gave the weight 0.
        """
        tokens, trained = len(self.live), self.trained
        if lost:
            return SampleTokenCounts(self.row.key, 0, tokens, self._reason() if trained == 0 else lost)
        return SampleTokenCounts(self.row.key, trained - rejected, tokens - trained, self._reason(), rejected)

    def _reason(self) -> str:
        if not self.counted:
            return "truncated"
        return "" if self.trained == len(self.live) else "stale"


def mask_rows(
    rows: Sequence[TrainRow], incarnation: int, version: int, limit: int, policy: Policy, mask_truncated: bool
) -> list[MaskedRow]:
    """Masks every token of another incarnation or of a version older than `version - limit`.

    The policy `admit` has no limit. With `mask_truncated` a truncated row leaves the loss and its denominators; a stale
    token only loses its loss term.
    """
    masked = []
    for row in rows:
        fresh = np.ones(len(row.versions), np.bool_) if policy == "admit" else live(row.versions, version, limit)
        counted = not (mask_truncated and row.truncated)
        is_live = fresh & (row.incarnation == incarnation) & counted
        masked.append(MaskedRow(row, is_live, counted, version - row.versions))
    return masked
