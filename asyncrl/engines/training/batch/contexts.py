"""Splits rows into contexts: the conversations of an episode, of which the policy sees one at a time.

    row         prompt | sampled | given | sampled || given | sampled
    contexts    prompt | sampled | given | sampled
                                           prompt  | sampled

A model gets each context as a row of its own. The sampled tokens of a row keep their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.training.batch.train_rows import Ids
from asyncrl.protocols.batch import sampled_places

Sampled: TypeAlias = Ids | slice
"""Selects the tokens of a response that the policy sampled; the others were given to it."""
ALL_SAMPLED = slice(None)

Spans: TypeAlias = NDArray[np.int32] | None
"""The column `spans` of a row (see `trajectory_columns`); None where each token of the response was sampled."""


@dataclass(frozen=True, slots=True)
class Context:
    """Holds token ids of a conversation. sampled: which tokens of the response the policy sampled."""

    prompt: Ids
    response: Ids
    sampled: Sampled


def contexts_of(prompt: Ids, response: Ids, spans: Spans) -> list[Context]:
    """Returns the contexts of a row, in the order in which they began."""
    if spans is None:
        return [Context(prompt, response, ALL_SAMPLED)]
    found = []
    begin = 0
    context = prompt
    for first, last in _turns_of_contexts(spans):
        own = spans[2 * first : 2 * last].copy()
        following = -min(0, int(own[-1]))  # The prompt of the next context.
        own[-1] = max(0, own[-1])
        end = begin + int(own.sum())
        found.append(Context(context, response[begin:end], sampled_places(own)))
        context = response[end : end + following]
        begin = end + following
    return found


def are_plain(spans: Sequence[Spans]) -> bool:
    """Returns whether the policy sampled every token of all these responses, so that each row is one context."""
    return all(own is None for own in spans)


def padded_sizes(prompts: Sequence[int], spans: Sequence[Spans], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the tokens of the longest context of each row, and the number of its contexts. prompts, lengths: tokens
    of the prompt and of the whole row."""
    if are_plain(spans):
        return [*lengths], [1] * len(lengths)
    longest = []
    numbers = []
    for prompt, own, length in zip(prompts, spans, lengths, strict=True):
        sizes = [length] if own is None or np.all(own >= 0) else _sizes(prompt, own)
        longest.append(max(sizes))
        numbers.append(len(sizes))
    return longest, numbers


def _sizes(prompt: int, spans: NDArray[np.int32]) -> list[int]:
    sizes = []
    for first, last in _turns_of_contexts(spans):
        following = -min(0, int(spans[2 * last - 1]))
        sizes.append(prompt + int(np.abs(spans[2 * first : 2 * last]).sum()) - following)
        prompt = following
    return sizes


def _turns_of_contexts(spans: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Returns the first turn of each context and the one after its last."""
    ends = [*(np.flatnonzero(spans[1::2] < 0) + 1).tolist(), len(spans) // 2]
    return list(zip([0, *ends[:-1]], ends, strict=True))
