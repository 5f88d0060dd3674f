"""Packs rows into micro-batches of similar length and pads them to tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SHORTEST = 0.8
"""A row below this share of the longest row of a micro-batch starts the next one: padding adds at most a quarter."""

FILLED = 1 / 8
"""A micro-batch below this share of the token budget accepts shorter rows too, because small passes are inefficient."""


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Holds the model input of some rows, and where the model predicts their response tokens.

    ids: [rows, length], right-padded, without the last token of each row, which predicts nothing. positions: [tokens],
    the indices into the flattened [rows * length] states that predict the response tokens, row after row. targets:
    [tokens], the response ids. temperatures: [tokens].
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    temperatures: Tensor


@dataclass(frozen=True, slots=True)
class PaddedSequences:
    """Holds whole rows. ids: [rows, length], right-padded. last: [rows], each row's last token in the flattened ids."""

    ids: Tensor
    last: Tensor


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Groups row indices into micro-batches of rows of similar length, the longest rows first.

    rows x longest row <= budget, so the budget counts padding and bounds memory. A row over the budget forms a
    micro-batch of its own. Because the longest rows come first, a lack of memory shows at once.
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
    """Returns whether a row of this length joins a micro-batch of `rows` rows."""
    if (rows + 1) * longest > budget:
        return False
    return length >= SHORTEST * longest or rows * longest < FILLED * budget


def pad_rows(
    prompts: Sequence[NDArray[np.int64]],
    responses: Sequence[NDArray[np.int64]],
    temperatures: Sequence[float],
    device: torch.device,
) -> PaddedRows:
    """Pads rows of prompt and response for the prediction of every response token."""
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


def pad_sequences(
    prompts: Sequence[NDArray[np.int64]], responses: Sequence[NDArray[np.int64]], device: torch.device
) -> PaddedSequences:
    """Pads whole rows of prompt and response, the last token included."""
    rows = [np.concatenate(parts) for parts in zip(prompts, responses, strict=True)]
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), lengths.max()), np.int64)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    last = np.arange(len(rows)) * ids.shape[1] + lengths - 1
    return PaddedSequences(torch.from_numpy(ids).to(device), torch.from_numpy(last).to(device))


def split_by_row(tokens: Tensor, lengths: Sequence[int]) -> list[NDArray[np.float32]]:
    """Splits flat per-token values into one numpy array per row."""
    return np.split(tokens.detach().cpu().numpy(), np.cumsum(lengths)[:-1])
