"""The tensors of one forward and backward pass: padded rows for the model, flat live tokens for the loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.training.batch.masking import MaskedRow
from asyncrl.engines.training.batch.packing import PaddedRows, pad_rows
from asyncrl.objectives.ragged import Ragged

PerToken: TypeAlias = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int64] | float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Holds the tensors of one pass. All tensors but `padded.ids` are flat [live tokens], row after row.

    masked: the rows. ragged: the row of each live token. weights: weight of each token in the loss. behaviour:
    log-probs that the engine recorded. fresh: 1 where the token and all earlier tokens of its sample were sampled by
    the weights that now train, else 0. reference: log-probs of the reference model, None without a KL term. proximal:
    the trainer's log-probs at the start of the step, None where the current ones equal them.
    """

    masked: tuple[MaskedRow, ...]
    padded: PaddedRows
    ragged: Ragged
    weights: Tensor
    behaviour: Tensor
    advantages: Tensor
    staleness: Tensor
    fresh: Tensor
    reference: Tensor | None
    proximal: Tensor | None


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """Holds a row of one update. weight: of each of its tokens. proximal: its log-probs at the start of the step."""

    masked: MaskedRow
    weight: float
    proximal: NDArray[np.float32] | None = None


def micro_batch(rows: Sequence[UpdateRow], device: torch.device) -> MicroBatch:
    """Builds the tensors of a pass over these rows."""
    masked = [row.masked for row in rows]

    def flat(values: Callable[[UpdateRow], PerToken]) -> Tensor:
        return live_values(masked, [values(row) for row in rows], device)

    return MicroBatch(
        masked=tuple(masked),
        padded=live_rows(masked, device),
        ragged=Ragged.of([item.trained for item in masked], device),
        weights=flat(lambda row: row.weight),
        behaviour=flat(lambda row: row.masked.row.logprobs),
        advantages=flat(lambda row: row.masked.row.advantage),
        staleness=flat(lambda row: row.masked.staleness),
        fresh=flat(lambda row: (np.maximum.accumulate(row.masked.staleness) == 0).astype(np.float32)),
        reference=flat(_reference) if masked[0].row.reference_logprobs is not None else None,
        proximal=flat(_proximal) if rows[0].proximal is not None else None,
    )


def live_values(masked: Sequence[MaskedRow], columns: Sequence[PerToken], device: torch.device) -> Tensor:
    """Returns one value per live token, float32 [live tokens], from one column per row or one number per row."""
    live = [np.broadcast_to(column, item.live.shape)[item.live] for item, column in zip(masked, columns, strict=True)]
    return torch.from_numpy(np.concatenate(live).astype(np.float32)).to(device)


def live_rows(masked: Sequence[MaskedRow], device: torch.device) -> PaddedRows:
    """Pads whole rows for the model, with predictions for live tokens only."""
    rows = [item.row for item in masked]
    padded = pad_rows(
        [row.prompt_ids for row in rows],
        [row.response_ids for row in rows],
        [row.temperature for row in rows],
        device,
    )
    live = torch.from_numpy(np.concatenate([item.live for item in masked])).to(device)
    return replace(
        padded,
        positions=padded.positions[live],
        targets=padded.targets[live],
        temperatures=padded.temperatures[live],
    )


def _reference(row: UpdateRow) -> NDArray[np.float32]:
    values = row.masked.row.reference_logprobs
    assert values is not None, f"sample {row.masked.row.key} has no reference log-probs"
    return values


def _proximal(row: UpdateRow) -> NDArray[np.float32]:
    assert row.proximal is not None, f"sample {row.masked.row.key} has no proximal log-probs"
    return row.proximal
