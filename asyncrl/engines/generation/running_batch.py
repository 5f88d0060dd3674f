"""The running batch: a table of the samples in slots. Row i is slot i, and used rows are always the first ones."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation.sample_requests import Completion, Finish, SampleRequest
from asyncrl.protocols.seeds import draws


class RunningBatch:
    """Holds one array per column, each with one entry per slot. sampled: number of sampled tokens. drawn: of earlier
    turns. cached: whether the KV cache holds all tokens of the row but the newest. held: of a row that goes on and is
    not cached, the first tokens that the KV cache holds."""

    def __init__(self, slots: int, max_new_tokens: int) -> None:
        self.requests: list[SampleRequest] = []
        self.sampled = np.zeros(slots, np.int64)
        self.drawn = np.zeros(slots, np.int64)
        self.cached = np.zeros(slots, np.bool_)
        self.held = np.zeros(slots, np.int64)
        self.tokens = np.zeros((slots, max_new_tokens), np.int32)
        self.logprobs = np.zeros((slots, max_new_tokens), np.float32)
        self.versions = np.zeros((slots, max_new_tokens), np.int32)
        self.ends_at = np.zeros(slots, np.float64)

    @property
    def decoding(self) -> int:
        """Counts the cached rows. They come first: new rows are appended, and new weights uncache all rows."""
        return int(np.count_nonzero(self.cached[: len(self.requests)]))

    def add(self, request: SampleRequest, now: float) -> None:
        """Gives a request a row, from which on its deadline runs. now: in seconds of any clock."""
        self.ends_at[len(self.requests)] = now + request.deadline
        self.sampled[len(self.requests)] = 0
        self.drawn[len(self.requests)] = request.drawn
        self.cached[len(self.requests)] = False
        self.held[len(self.requests)] = 0
        self.requests.append(request)

    def remove(self, row: int) -> None:
        """Removes a row; the last row takes its place."""
        last = len(self.requests) - 1
        columns: list[list[Any] | NDArray[Any]] = [self.requests, self.sampled, self.drawn, self.cached, self.held]
        for column in (*columns, self.ends_at, self.tokens, self.logprobs, self.versions):
            column[row] = column[last]
        self.requests.pop()

    def uncache(self) -> None:
        """Notes that the KV cache holds no token of any row any more that counts."""
        self.cached[:] = False
        self.held[:] = 0

    def lengths(self, rows: int) -> NDArray[np.int64]:
        """Returns the prompt and sampled tokens of each of the first `rows` rows."""
        return np.array([len(request.prompt) for request in self.requests[:rows]], np.int64) + self.sampled[:rows]

    def sequence(self, row: int) -> NDArray[np.int64]:
        """Returns all tokens of a row, prompt first."""
        parts = [self.requests[row].prompt, self.tokens[row, : self.sampled[row]]]
        return np.concatenate(parts).astype(np.int64)

    def newest(self, rows: int) -> NDArray[np.int64]:
        """Returns the newest token of each of the first `rows` rows."""
        return self.tokens[np.arange(rows), self.sampled[:rows] - 1].astype(np.int64)

    def uniforms(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the uniform numbers that draw the next token of each row."""
        seeds = np.array([self.requests[row].seed for row in rows], np.uint64)
        return draws(seeds, (self.drawn[rows] + self.sampled[rows]).astype(np.uint64))

    def record(
        self, rows: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int
    ) -> None:
        """Appends one sampled token to each of the rows."""
        at = (rows, self.sampled[rows])
        self.tokens[at] = tokens
        self.logprobs[at] = logprobs
        self.versions[at] = version
        self.sampled[rows] += 1
        self.cached[rows] = True

    def completion(self, row: int, finish: Finish, text: str) -> Completion:
        """Returns a copy of what was recorded of a row."""
        span = np.s_[row, : self.sampled[row]]
        recorded = (self.tokens[span].copy(), self.logprobs[span].copy(), self.versions[span].copy())
        return Completion(self.requests[row], *recorded, finish, text)
