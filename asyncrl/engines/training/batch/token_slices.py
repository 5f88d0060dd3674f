"""Cuts rows into slices of their tokens, one for each of the ranks that compute the same rows together.

    row of 7 tokens     t0 t1 t2 t3 | t4 t5 t6 padding      two ranks, each with as many positions of every row

A rank predicts the tokens whose state is in its slice; the token after its last state is in the next slice, and all
ranks know all tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.engines.training.batch.micro_batches import ModelInput, ModelRows


def own_slice(rows: ModelRows, rank: int, size: int) -> tuple[ModelRows, Tensor]:
    """Returns the slice of each pass that this rank computes, and which of the targets, bool [tokens], it predicts.
    Packed rows are not cut."""
    cut = [_slice_of_pass(each, rank, size) for each in rows.passes]
    own = torch.cat([inside for _, inside in cut])
    chosen, order = own, rows.order
    if order is not None:
        chosen = own[order]
        order = (own.cumsum(0) - 1)[order[chosen]]
    passes = tuple(each for each, _ in cut)
    return ModelRows(passes, rows.targets[chosen], rows.temperatures[chosen], order), chosen


def _slice_of_pass(rows: ModelInput, rank: int, size: int) -> tuple[ModelInput, Tensor]:
    """Returns the slice, and which of the positions are inside it."""
    assert rows.attention is None, "packed rows are not cut"
    length = rows.ids.shape[1]
    width = -(-length // size)
    first = rank * width
    row, column = rows.positions // length, rows.positions % length
    inside = column // width == rank
    positions = (row * width + column - first)[inside]
    ids = torch.nn.functional.pad(rows.ids, (0, size * width - length))[:, first : first + width]
    position_ids = torch.arange(first, first + width, device=ids.device)[None]
    return replace(rows, ids=ids, positions=positions, position_ids=position_ids), inside
