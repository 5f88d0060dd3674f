"""The table of running samples: row i is the sample in slot i. Rows in use are always the first `count`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation.interface import Request
from asyncrl.protocols.seeds import draws


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was recorded of one sample; all [sampled tokens]."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


class RunningTable:
    """Arrays over slots. cached: whether the keys of the row's tokens, but for the newest, lie in the cache."""

    def __init__(self, slots: int, max_new_tokens: int) -> None:
        self.requests: list[Request] = []
        self._rows: list[NDArray[Any]] = [
            np.zeros(slots, np.int64),
            np.zeros(slots, np.int64),
            np.zeros(slots, np.int64),
            np.zeros(slots, np.uint64),
            np.zeros(slots, np.float32),
            np.zeros(slots, np.bool_),
            np.zeros((slots, max_new_tokens), np.int32),
            np.zeros((slots, max_new_tokens), np.float32),
            np.zeros((slots, max_new_tokens), np.int32),
        ]
        self.prompt_tokens, self.sampled, self.budget, self.seeds, self.temperatures, self.cached = self._rows[:6]
        self.tokens, self.logprobs, self.versions = self._rows[6:]

    @property
    def count(self) -> int:
        return len(self.requests)

    @property
    def decoding(self) -> int:
        """Rows whose keys are cached: the first ones, for new rows come behind and new weights uncache all."""
        return int(np.count_nonzero(self.cached[: self.count]))

    def add(self, request: Request) -> None:
        row = self.count
        self.requests.append(request)
        self.prompt_tokens[row], self.sampled[row] = len(request.prompt), 0
        self.budget[row], self.seeds[row] = request.max_new_tokens, request.seed
        self.temperatures[row], self.cached[row] = request.temperature, False

    def remove(self, row: int) -> None:
        """Forget a row; the last row takes its place."""
        last = self.requests.pop()
        if row < self.count:
            self.requests[row] = last
            for column in self._rows:
                column[row] = column[self.count]

    def length(self, row: int) -> int:
        """Prompt and sampled tokens of a row."""
        return int(self.prompt_tokens[row] + self.sampled[row])

    def sequence(self, row: int) -> NDArray[np.int64]:
        """All tokens of a row, prompt first."""
        tokens: NDArray[np.int64] = np.concatenate(
            [self.requests[row].prompt, self.tokens[row, : self.sampled[row]]], dtype=np.int64
        )
        return tokens

    def newest(self, rows: int) -> NDArray[np.int64]:
        """The newest token of each of the first rows."""
        tokens: NDArray[np.int64] = self.tokens[np.arange(rows), self.sampled[:rows] - 1].astype(np.int64)
        return tokens

    def uniforms(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The draws of the rows' next tokens."""
        return draws(self.seeds[rows], self.sampled[rows].astype(np.uint64))

    def record(
        self, rows: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int
    ) -> None:
        at = (rows, self.sampled[rows])
        self.tokens[at], self.logprobs[at], self.versions[at] = tokens, logprobs, version
        self.sampled[rows] += 1
        self.cached[rows] = True

    def recorded(self, row: int) -> Sampled:
        span = np.s_[row, : self.sampled[row]]
        return Sampled(self.tokens[span].copy(), self.logprobs[span].copy(), self.versions[span].copy())
