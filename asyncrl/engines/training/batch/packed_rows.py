"""Lays out samples one after the other in one row of the model, without padding, and computes prompts that samples
share once.

    row of the model     prompt A | answer 1 | answer 2 | prompt B and answer 3 | prompt C | answer 4 | answer 5

A segment is what stands between two bars. A token sees the earlier tokens of its own segment and, in an answer whose
prompt is a segment, that prompt; it has the position of its own sample. States differ from those of padded rows in
their last bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from asyncrl.engines.training.batch.packing_families import WORTH, is_shared
from asyncrl.engines.training.batch.train_rows import Ids

Block: TypeAlias = list[int]
"""Indices of the samples of one prompt."""


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Holds places of tokens in the packed row. begin, length: of the segment; given_begin, given: of the prompt that
    it sees, of no tokens where the prompt is part of the segment or is the segment."""

    begin: int
    length: int
    given_begin: int = 0
    given: int = 0

    @property
    def own(self) -> slice:
        """Returns the places of its tokens."""
        return slice(self.begin, self.begin + self.length)

    @property
    def prompt(self) -> slice:
        """Returns the places of the prompt that it sees."""
        return slice(self.given_begin, self.given_begin + self.given)


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Holds the samples in one row of the model. ids, position_ids: [tokens]. segments: in the order of their tokens,
    which they cover. states: of each sample the indices [tokens] of the states that predict its response."""

    ids: Ids
    position_ids: Ids
    segments: tuple[RowSegment, ...]
    states: list[Ids]


def pack_rows(
    prompts: Sequence[Ids], responses: Sequence[Ids], budget: float, shared_from: float = 0.0
) -> PackedSamples | None:
    """Packs samples. Returns None where it saves too little, and padded rows are within the budget of tokens.
    shared_from: least length of a prompt, over the mean of its answers, that samples share."""
    blocks = list(_blocks(prompts, responses, shared_from))
    tokens = sum(len(prompts[block[0]]) for block in blocks) + sum(len(each) - 1 for each in responses)
    padded = len(prompts) * max(len(prompt) + len(each) - 1 for prompt, each in zip(prompts, responses, strict=True))
    if padded <= budget and tokens > WORTH * padded:
        return None
    parts: list[Ids] = []
    positions: list[Ids] = []
    segments: list[RowSegment] = []
    states = [np.zeros(0, np.int64)] * len(prompts)
    begin = 0
    for block in blocks:
        prompt = prompts[block[0]]
        inputs = [responses[index][:-1] for index in block]
        last = begin + len(prompt) - 1
        parts += [prompt, *inputs]
        positions += [np.arange(len(prompt)), *(len(prompt) + np.arange(len(tokens)) for tokens in inputs)]
        places = np.cumsum([begin, len(prompt), *map(len, inputs)]).tolist()
        for index, (first, end) in zip(block, pairwise(places[1:]), strict=True):
            states[index] = np.concatenate([[last], np.arange(first, end)])
        segments += _segments(places)
        begin = places[-1]
    return PackedSamples(np.concatenate(parts), np.concatenate(positions), tuple(segments), states)


def _blocks(prompts: Sequence[Ids], responses: Sequence[Ids], shared_from: float) -> Iterator[Block]:
    """Yields the samples that share a prompt, and the others alone."""
    found: dict[bytes, Block] = {}
    for index, prompt in enumerate(prompts):
        found.setdefault(prompt.tobytes(), []).append(index)
    for block in found.values():
        answers = sum(len(responses[index]) for index in block)
        if is_shared(len(prompts[block[0]]), answers, len(block), shared_from):
            yield block
        else:
            yield from ([index] for index in block)


def _segments(places: Sequence[int]) -> list[RowSegment]:
    """Returns the segments of a prompt and its answers. places: where each begins, and the end of the last one."""
    begin, first, *_ = places
    if len(places) == 3:
        return [RowSegment(begin, places[-1] - begin)]
    answers = [RowSegment(at, end - at, begin, first - begin) for at, end in pairwise(places[1:]) if end > at]
    return [RowSegment(begin, first - begin), *answers]
