"""The tensors of one forward and backward pass: rows padded for the model, live tokens flat for the loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.training.interface import TrainRow
from asyncrl.engines.training.masking import Masked
from asyncrl.engines.training.packing import PaddedRows, pad_rows
from asyncrl.objectives.rows import Rows

PerToken: TypeAlias = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int64] | float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """masked: its rows. All tensors but `padded.ids` are [live tokens], row after row; rows: which is whose.

    weights: what each token counts in the loss. fresh: 1 where the token and all before it in its sample were sampled
    by the very weights that now train, else 0.
    reference: frozen model's log-probs, None without a KL term. proximal: the trainer's own at the start of
    the step, None where the current ones are those.
    """

    masked: tuple[Masked, ...]
    padded: PaddedRows
    rows: Rows
    weights: Tensor
    behaviour: Tensor
    advantages: Tensor
    staleness: Tensor
    fresh: Tensor
    reference: Tensor | None
    proximal: Tensor | None


@dataclass(frozen=True, slots=True)
class PartRow:
    """A row of one update: weight of each of its tokens; proximal: its own log-probs at the start of the step."""

    masked: Masked
    weight: float
    proximal: NDArray[np.float32] | None = None


def micro_batch(rows: Sequence[PartRow], device: torch.device) -> MicroBatch:
    masked = [row.masked for row in rows]

    def flat(values: Callable[[PartRow], PerToken]) -> Tensor:
        return live_values(masked, [values(row) for row in rows], device)

    return MicroBatch(
        masked=tuple(masked),
        padded=live_rows(masked, device),
        rows=Rows.of([item.trained for item in masked], device),
        weights=flat(lambda row: row.weight),
        behaviour=flat(lambda row: row.masked.row.logprobs),
        advantages=flat(lambda row: row.masked.row.advantage),
        staleness=flat(lambda row: row.masked.staleness),
        fresh=flat(lambda row: (np.maximum.accumulate(row.masked.staleness) == 0).astype(np.float32)),
        reference=flat(_reference) if masked[0].row.reference_logprobs is not None else None,
        proximal=flat(_proximal) if rows[0].proximal is not None else None,
    )


def live_values(masked: Sequence[Masked], columns: Sequence[PerToken], device: torch.device) -> Tensor:
    """float32 [live tokens] of one column a row; one number stands for all tokens of its row."""
    live = [np.broadcast_to(column, item.live.shape)[item.live] for item, column in zip(masked, columns, strict=True)]
    return torch.from_numpy(np.concatenate(live).astype(np.float32)).to(device)


def live_rows(masked: Sequence[Masked], device: torch.device) -> PaddedRows:
    """Whole rows for the model, predictions of live tokens only."""
    rows: list[TrainRow] = [item.row for item in masked]
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


def _reference(row: PartRow) -> NDArray[np.float32]:
    values = row.masked.row.reference_logprobs
    assert values is not None, f"sample {row.masked.row.key} has no reference log-probs"
    return values


def _proximal(row: PartRow) -> NDArray[np.float32]:
    assert row.proximal is not None
    return row.proximal
