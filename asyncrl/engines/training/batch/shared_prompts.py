"""Lays out samples of one prompt in one row, so that a forward pass computes the tokens of their prompt once.

    row of the model     prompt A | answer 1 | answer 2 | prompt B | answer 3 | answer 4 | padding

A token sees its prompt and the earlier tokens of its own answer, and has the position of its own sample. States differ
from those of separate rows in their last bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from asyncrl.engines.training.batch.sharing_cost import pass_cost
from asyncrl.engines.training.batch.train_rows import Ids

Block: TypeAlias = list[int]
"""Indices of the samples of one prompt."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Holds the rows of a model that share prompts. ids, position_ids: [rows, length]. segments: number of the prompt
    or answer of each token, -1 for padding. prompts: number of the prompt of each token. states: of each sample the
    indices [tokens], in the flattened rows, of the states that predict its response."""

    ids: Ids
    position_ids: Ids
    segments: Ids
    prompts: Ids
    states: list[Ids]

    def mask(self, device: torch.device) -> Tensor:
        """Returns which token (last dimension) each token sees, bool [rows, 1, length, length]."""
        segments, prompts = (torch.from_numpy(each).to(device) for each in (self.segments, self.prompts))
        keys = segments[:, None, :]
        return ((segments[:, :, None] == keys) | (prompts[:, :, None] == keys)).tril()[:, None]


def share_prompts(prompts: Sequence[Ids], responses: Sequence[Ids], width: int) -> SharedRows | None:
    """Lays out samples in rows that share prompts. Returns None where separate rows cost less: no two samples have the
    same prompt, or their answers are so long that attention over all of them costs more than the prompts."""
    blocks: dict[bytes, Block] = {}
    for index, prompt in enumerate(prompts):
        blocks.setdefault(prompt.tobytes(), []).append(index)
    if len(blocks) == len(prompts):
        return None
    inputs = [response[:-1] for response in responses]
    sizes = [len(prompts[block[0]]) + sum(len(inputs[index]) for index in block) for block in blocks.values()]
    rows, length = _rows_of_blocks(list(blocks.values()), sizes), max(sizes)
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, inputs, strict=True))
    shared, separate = pass_cost(len(rows), length, width), pass_cost(len(prompts), longest, 2 * width)
    return _lay_out(rows, length, prompts, inputs) if shared < separate else None


def _rows_of_blocks(blocks: Sequence[Block], sizes: Sequence[int]) -> list[list[Block]]:
    """Puts each block, the largest first, into the first row that has room for it; the largest block fills a row."""
    rows: list[tuple[int, list[Block]]] = []
    for size, _, block in sorted(zip((-size for size in sizes), range(len(blocks)), blocks, strict=True)):
        place = next((place for place, (used, _) in enumerate(rows) if used - size <= max(sizes)), len(rows))
        used, others = rows.pop(place) if place < len(rows) else (0, [])
        rows.insert(place, (used - size, [*others, block]))
    return [row for _, row in rows]


def _lay_out(rows: Sequence[Sequence[Block]], length: int, prompts: Sequence[Ids], inputs: Sequence[Ids]) -> SharedRows:
    ids, position_ids = (np.zeros((len(rows), length), np.int64) for _ in range(2))
    segments, own_prompts = (np.full((len(rows), length), -1) for _ in range(2))
    states = [np.zeros(0, np.int64)] * len(prompts)
    number = 0
    for row, blocks in enumerate(rows):
        begin = 0
        for block in blocks:
            prompt, own = prompts[block[0]], number
            given, last = len(prompt), row * length + begin + len(prompt) - 1
            parts = [(prompt, 0), *((inputs[index], given) for index in block)]
            for index, (tokens, first) in zip((None, *block), parts, strict=True):
                place = (row, slice(begin, begin + len(tokens)))
                ids[place], position_ids[place] = tokens, first + np.arange(len(tokens))
                segments[place], own_prompts[place] = number, own
                if index is not None:
                    states[index] = np.concatenate([[last], row * length + begin + np.arange(len(tokens))])
                begin += len(tokens)
                number += 1
    return SharedRows(ids, position_ids, segments, own_prompts, states)
