"""A sample in turns: what the policy sampled and what its environment gave, as the columns of a row.

response_ids   s s s g g s s g s s s      s: sampled, g: given
spans          3 2   2 1   3 0            for each turn, the tokens sampled and those given after it
logprobs       . . .     . .   . . .      of sampled tokens only, as are versions
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation.sample_requests import Completion
from asyncrl.engines.generation.tokenization import Message
from asyncrl.protocols.batch import Array

Ids = NDArray[np.int32]
ROW = ("prompt_ids", "response_ids", "logprobs", "versions", "spans", "transcript")
"""Columns that the next turn of a trajectory is made from."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The turns of a sample so far. transcript: the messages after the prompt, the policy's as "assistant"."""

    prompt: Ids
    response: Ids
    logprobs: NDArray[np.float32]
    versions: Ids
    spans: Ids
    transcript: tuple[Message, ...]

    @classmethod
    def begin(cls, prompt: Ids) -> "Trajectory":
        nothing = np.zeros(0, np.int32)
        return cls(prompt, nothing, np.zeros(0, np.float32), nothing, nothing, ())

    @classmethod
    def of_row(cls, columns: Mapping[str, Array]) -> "Trajectory":
        """Reads the columns of `ROW`."""
        prompt, response, logprobs, versions, spans, transcript = (columns[name] for name in ROW)
        return cls(prompt, response, logprobs, versions, spans, tuple(json.loads(bytes(transcript))))

    @property
    def tokens(self) -> Ids:
        return np.concatenate([self.prompt, self.response])

    @property
    def turns(self) -> int:
        return len(self.spans) // 2

    @property
    def given(self) -> int:
        return int(self.spans[1::2].sum())

    @property
    def answer(self) -> Ids:
        """Returns the sampled tokens of the newest turn, after which nothing was given yet."""
        return self.response[len(self.response) - int(self.spans[-2]) :]

    @property
    def unanswered(self) -> tuple[Message, ...]:
        """Returns the messages after the newest one of the policy."""
        own = [place for place, message in enumerate(self.transcript) if message["role"] == "assistant"]
        return self.transcript[own[-1] + 1 :]

    def with_given(self, tokens: Ids) -> "Trajectory":
        spans = self.spans.copy()
        spans[-1] = len(tokens)
        return replace(self, response=np.concatenate([self.response, tokens]), spans=spans)

    def with_answer(self, completion: Completion) -> "Trajectory":
        """Adds a turn that was sampled."""
        return Trajectory(
            self.prompt,
            np.concatenate([self.response, completion.tokens]),
            np.concatenate([self.logprobs, completion.logprobs]),
            np.concatenate([self.versions, completion.versions]),
            np.concatenate([self.spans, np.array([len(completion.tokens), 0], np.int32)]),
            (*self.transcript, {"role": "assistant", "content": completion.text}),
        )

    def columns(self) -> dict[str, Array]:
        """Returns the columns of `ROW`, and `text`: the newest answer."""
        arrays = (self.prompt, self.response, self.logprobs, self.versions, self.spans)
        transcript, text = json.dumps(self.transcript, ensure_ascii=False), str(self.transcript[-1]["content"])
        encoded = (np.frombuffer(each.encode(), np.uint8) for each in (transcript, text))
        return dict(zip((*ROW, "text"), (*arrays, *encoded), strict=True))
