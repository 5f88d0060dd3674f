"""Which response tokens enter the loss. The bound on staleness is enforced here and nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.training.interface import SampleOutcome, TrainRow
from asyncrl.groups import Policy
from asyncrl.staleness import live


@dataclass(frozen=True, slots=True)
class Masked:
    """One row and which of its tokens are live. counted: the row is part of the denominators."""

    row: TrainRow
    live: NDArray[np.bool_]
    counted: bool
    staleness: NDArray[np.int64]

    @property
    def trained(self) -> int:
        return int(self.live.sum())

    @property
    def tokens(self) -> int:
        """Of prompt and response."""
        return len(self.row.prompt_ids) + len(self.row.response_ids)

    def outcome(self, lost: str = "", rejected: int = 0) -> SampleOutcome:
        """lost: why the live tokens did not train after all. rejected: live tokens that a correction left out."""
        tokens, trained = len(self.live), self.trained
        if lost:
            return SampleOutcome(self.row.key, 0, tokens, self._reason() if trained == 0 else lost)
        return SampleOutcome(self.row.key, trained - rejected, tokens - trained, self._reason(), rejected)

    def _reason(self) -> str:
        if not self.counted:
            return "truncated"
        return "" if self.trained == len(self.live) else "stale"


def mask_rows(
    rows: Sequence[TrainRow], epoch: int, version: int, limit: int, policy: Policy, mask_truncated: bool
) -> list[Masked]:
    """live = response & (epoch == own) & (version - versions <= limit); `admit` knows no limit.

    A truncated row is left out altogether under `mask_truncated`; a stale token only loses its term.
    """
    return [_mask_row(row, epoch, version, limit, policy, mask_truncated) for row in rows]


def _mask_row(row: TrainRow, epoch: int, version: int, limit: int, policy: Policy, mask_truncated: bool) -> Masked:
    staleness = version - row.versions
    fresh = np.ones(len(staleness), np.bool_) if policy == "admit" else live(row.versions, version, limit)
    counted = not (mask_truncated and row.truncated)
    return Masked(row, fresh & (row.epoch == epoch) & counted, counted, staleness)
