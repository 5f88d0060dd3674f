"""The running batch: a table of the samples in slots. Row i is slot i, and used rows are always the first ones."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.experts.record_shape import RecordShape
from asyncrl.engines.generation.scheduling.block_pool import Ints
from asyncrl.engines.generation.scheduling.sample_requests import Completion, Finish, SampleRequest
from asyncrl.protocols.seeds import draws

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


class RunningBatch:
    """Holds one array per column, each with one entry per slot. sampled: number of sampled tokens. drawn: of earlier
    turns. cached: whether the KV cache holds all tokens of the row but the newest. held: of a row that is not cached,
    the first tokens that the KV cache holds. interrupted: how often new weights discarded these before the row was
    cached. age: rows are numbered as they start. prompts: key of each prompt, by which rows share it.

    The deadline of a row runs from its start on, but not while the row waits for blocks after it lost its own. ends_at:
    when it is over, in seconds of `clock`; inf while it stands still. left: the seconds that were left then.

    record: of the experts of each token; None keeps none."""

    def __init__(
        self,
        slots: int,
        max_new_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        record: RecordShape | None = None,
    ) -> None:
        self.clock = clock
        self.requests: list[SampleRequest] = []
        self.prompts: list[bytes] = []
        self.sampled = np.zeros(slots, np.int64)
        self.drawn = np.zeros(slots, np.int64)
        self.cached = np.zeros(slots, np.bool_)
        self.held = np.zeros(slots, np.int64)
        self.interrupted = np.zeros(slots, np.int64)
        self.age = np.zeros(slots, np.int64)
        self.tokens = np.zeros((slots, max_new_tokens), np.int32)
        self.logprobs = np.zeros((slots, max_new_tokens), np.float32)
        self.versions = np.zeros((slots, max_new_tokens), np.int32)
        self.ends_at = np.zeros(slots, np.float64)
        self.left = np.zeros(slots, np.float64)
        self._experts = None if record is None else SampleExperts(slots, max_new_tokens, record)
        self._started = 0

    @property
    def decoding(self) -> Ints:
        """Returns the cached rows."""
        return np.flatnonzero(self.cached[: len(self.requests)])

    @property
    def prefilling(self) -> Ints:
        """Returns the other rows, the one that started first at the front."""
        rows = np.flatnonzero(~self.cached[: len(self.requests)])
        return rows[np.argsort(self.age[rows])]

    def add(self, request: SampleRequest) -> None:
        """Gives a request a row, from which on its deadline runs."""
        row = len(self.requests)
        self.ends_at[row] = self.clock() + request.deadline
        self.left[row] = np.inf
        self.sampled[row] = 0
        self.drawn[row] = request.drawn
        self.cached[row] = False
        self.held[row] = 0
        self.interrupted[row] = 0
        self.age[row] = self._started
        self._started += 1
        self.requests.append(request)
        self.prompts.append(request.prompt_key)

    def remove(self, row: int) -> None:
        """Removes a row; the last row takes its place."""
        last = len(self.requests) - 1
        columns: list[list[Any] | NDArray[Any]] = [self.requests, self.prompts, self.sampled, self.drawn, self.cached]
        columns += [self.held, self.interrupted, self.age, self.ends_at, self.left]
        for column in (*columns, self.tokens, self.logprobs, self.versions):
            column[row] = column[last]
        if self._experts is not None:
            self._experts.move(last, row)
        self.requests.pop()
        self.prompts.pop()

    def uncache(self, row: int) -> None:
        """Notes that the KV cache holds no token of a row any more that counts."""
        self.cached[row] = False
        self.held[row] = 0

    def stop_deadline(self, row: int) -> None:
        """Stops the deadline of a row that lost its blocks."""
        if self.ends_at[row] < np.inf:
            self.left[row] = self.ends_at[row] - self.clock()
            self.ends_at[row] = np.inf

    def resume_deadline(self, row: int) -> None:
        """Lets a stopped deadline run again, with the seconds that were left."""
        if self.ends_at[row] == np.inf and self.left[row] < np.inf:
            self.ends_at[row] = self.clock() + self.left[row]

    def overdue(self, rows: Ints) -> NDArray[np.bool_]:
        """Returns of each of these rows whether its deadline is over."""
        return self.ends_at[rows] <= self.clock()

    def lengths(self, rows: Ints) -> Ints:
        """Returns the prompt and sampled tokens of each of these rows."""
        return np.array([len(self.requests[row].prompt) for row in rows], np.int64) + self.sampled[rows]

    def sequence(self, row: int) -> Ints:
        """Returns all tokens of a row, prompt first."""
        parts = [self.requests[row].prompt, self.tokens[row, : self.sampled[row]]]
        return np.concatenate(parts).astype(np.int64)

    def newest(self, rows: Ints) -> Ints:
        """Returns the newest token of each of these rows; of a row without sampled tokens, the last of its prompt."""
        found = self.tokens[rows, self.sampled[rows] - 1].astype(np.int64)
        for index in np.flatnonzero(self.sampled[rows] == 0):
            found[index] = self.requests[rows[index]].prompt[-1]
        return found

    def uniforms(self, rows: Ints) -> NDArray[np.float64]:
        """Returns the uniform numbers that draw the next token of each row."""
        seeds = np.array([self.requests[row].seed for row in rows], np.uint64)
        return draws(seeds, (self.drawn[rows] + self.sampled[rows]).astype(np.uint64))

    def note_experts(self, rows: Ints, recall: Recall) -> None:
        """Notes the experts of the newest computed token of each row, before the next one is recorded; of a row that
        begins, those of its prompt too."""
        if self._experts is not None:
            self._experts.note(rows, self.lengths(rows) - self.sampled[rows], self.sampled[rows], recall)

    def record(self, rows: Ints, tokens: Ints, logprobs: NDArray[np.float32], version: int) -> None:
        """Appends one sampled token to each of the rows."""
        at = (rows, self.sampled[rows])
        self.tokens[at] = tokens
        self.logprobs[at] = logprobs
        self.versions[at] = version
        self.sampled[rows] += 1
        self.cached[rows] = True
        self.interrupted[rows] = 0

    def completion(self, row: int, finish: Finish, text: str) -> Completion:
        """Returns a copy of what was recorded of a row."""
        span = np.s_[row, : self.sampled[row]]
        recorded = (self.tokens[span].copy(), self.logprobs[span].copy(), self.versions[span].copy())
        experts = None
        if self._experts is not None:
            experts = self._experts.of(row, len(self.requests[row].prompt), int(self.sampled[row]))
        return Completion(self.requests[row], *recorded, finish, text, experts)
