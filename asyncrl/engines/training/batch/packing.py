"""Rows into micro-batches: which rows go together, and their tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Model input of some rows, and where the predictions of their response tokens lie.

    ids: [rows, length] right-padded, the last token of each row left out as nothing follows it. positions:
    [tokens] into the flattened [rows * length], of the state that predicts each response token, row after
    row. targets: [tokens] the response ids. temperatures: [tokens].
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    temperatures: Tensor


@dataclass(frozen=True, slots=True)
class WholeRows:
    """ids: [rows, length] right-padded. last: [rows] into the flattened [rows * length], of each row's last token."""

    ids: Tensor
    last: Tensor


SHORTEST = 0.8
"""Of the longest row of its micro-batch: a shorter row begins the next one, so padding costs at most a quarter more."""

FILLED = 1 / 8
"""Of the budget: a micro-batch with less in it takes shorter rows too, as a small pass is slow in itself."""


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Row indices of each micro-batch: rows of like length together, longest first, rows x longest <= budget.

    A row over the budget is a micro-batch of its own. Padding is what the budget counts, so memory is bounded
    by it; longest first shows at once when memory does not suffice.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    parts: list[list[int]] = []
    for row in order:
        if parts and _fits(lengths[row], len(parts[-1]), lengths[parts[-1][0]], budget):
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _fits(length: int, rows: int, longest: int, budget: int) -> bool:
    """Whether a row joins a micro-batch of so many rows."""
    if (rows + 1) * longest > budget:
        return False
    return length >= SHORTEST * longest or rows * longest < FILLED * budget


def pad_rows(
    prompts: Sequence[NDArray[np.int64]],
    responses: Sequence[NDArray[np.int64]],
    temperatures: Sequence[float],
    device: torch.device,
) -> PaddedRows:
    """Tensors of rows [prompt, response]; every response token, the first and the last included, is predicted."""
    length = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True)) - 1
    ids = np.zeros((len(prompts), length), np.int64)
    positions = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens = np.concatenate([prompt, response[:-1]])
        ids[row, : len(tokens)] = tokens
        first = row * length + len(prompt) - 1
        positions.append(np.arange(first, first + len(response)))
    lengths = [len(response) for response in responses]
    return PaddedRows(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(np.concatenate(positions)).to(device),
        torch.from_numpy(np.concatenate(responses).astype(np.int64)).to(device),
        torch.from_numpy(np.repeat(np.asarray(temperatures, np.float32), lengths)).to(device),
    )


def pad_whole(
    prompts: Sequence[NDArray[np.int64]], responses: Sequence[NDArray[np.int64]], device: torch.device
) -> WholeRows:
    """Tensors of rows [prompt, response], all their tokens in them."""
    rows = [np.concatenate(parts) for parts in zip(prompts, responses, strict=True)]
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), lengths.max()), np.int64)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    last = np.arange(len(rows)) * ids.shape[1] + lengths - 1
    return WholeRows(torch.from_numpy(ids).to(device), torch.from_numpy(last).to(device))
