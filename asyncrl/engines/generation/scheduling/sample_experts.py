"""The experts that routers chose for the tokens of running samples, as they were when each token was sampled.

positions    prompt 0 .. n-2 | n-1        n    ...        The forward at position p chooses token p + 1, so that the
noted        with the first  | one by one, as the         newest token has no record yet. What is computed again
             sampled token   | next token is sampled      later, with new weights or after a preemption, changes none.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.experts.record_shape import RecordShape
from asyncrl.engines.generation.scheduling.block_pool import Ints

Experts = NDArray[Any]
"""Numbers of experts [tokens, routers x k], see record_shape.py."""
Recall = Callable[[Ints, Ints], Experts]
"""Returns the experts of positions (second) of slots (first), as the cache holds them now."""


class SampleExperts:
    """Holds one entry per slot."""

    def __init__(self, slots: int, max_new_tokens: int, shape: RecordShape) -> None:
        self._shape = shape
        self._sampled = np.zeros((slots, max_new_tokens, shape.width), shape.dtype)
        self._prompts: list[Experts] = [self._nothing(0)] * slots

    def note(self, rows: Ints, prompts: Ints, sampled: Ints, recall: Recall) -> None:
        """Notes the experts of the newest computed token of these rows, of whose next one is sampled now. prompts,
        sampled: tokens of each row before."""
        for row, length in zip(rows[sampled == 0].tolist(), prompts[sampled == 0].tolist(), strict=True):
            self._prompts[row] = recall(np.full(length - 1, row), np.arange(length - 1))
        self._sampled[rows, sampled] = recall(rows, prompts + sampled - 1)

    def move(self, source: int, row: int) -> None:
        self._sampled[row] = self._sampled[source]
        self._prompts[row] = self._prompts[source]

    def of(self, row: int, prompt: int, sampled: int) -> Experts:
        """Returns the experts of a row with so many tokens, with NONE for the newest."""
        if not sampled:
            return self._nothing(prompt)
        return np.concatenate([self._prompts[row], self._sampled[row, :sampled], self._nothing(1)])

    def _nothing(self, tokens: int) -> Experts:
        return np.full((tokens, self._shape.width), self._shape.none, self._shape.dtype)
