"""Names the answers that a person is asked about, and what a person said about them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.rewards.sample import Sample

Prompt = str | list[dict[str, Any]]
EQUAL = 0.5
"""Value of two answers that a person finds equally good."""


@dataclass(frozen=True, slots=True)
class RatableAnswer:
    """One sample as a person reads it. turns: of an episode, its messages after the prompt. finish: why its sampling
    ended. tokens: ids of the conversation as the policy saw it, up to the end of its last answer."""

    group: int
    member: int
    prompt: Prompt
    text: str
    turns: list[dict[str, Any]] = field(default_factory=list)
    finish: str = "stop"
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32), compare=False)

    @classmethod
    def of(cls, sample: Sample, tokens: NDArray[np.int32]) -> "RatableAnswer":
        return cls(sample.group, sample.member, sample.prompt, sample.text, sample.turns, sample.finish, tokens)

    @property
    def id(self) -> str:
        """Returns a name that the same member of a group has again after a restart if its texts are the same."""
        said = json.dumps([self.prompt, self.text, self.turns], sort_keys=True).encode()
        return f"{self.group}.{self.member}.{hashlib.sha256(said).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A person's values of one answer, or of two answers that were compared: 1 for the better one. late: no answer of
    it waited any more, so that it is no reward of a sample. Without answers it repeats what is on disk already."""

    answers: tuple[RatableAnswer, ...]
    values: tuple[float, ...]
    late: bool = False

    def line(self, time: float) -> dict[str, Any]:
        """Returns the line of ratings.jsonl. time: seconds since 1970."""
        kind = "rating" if len(self.answers) == 1 else "pick"
        said = [
            {"sample": answer.id, "text": answer.text, "value": value, "finish": answer.finish}
            | ({"turns": answer.turns} if answer.turns else {})
            | {"tokens": answer.tokens.tolist()}
            for answer, value in zip(self.answers, self.values, strict=True)
        ]
        return {"kind": kind, "prompt": self.answers[0].prompt, "answers": said, "late": self.late, "time": time}


def values_of_line(line: dict[str, Any]) -> Sequence[tuple[str, float]]:
    """Returns name and value of each answer of a line; none where the line is no rating or pick."""
    if line.get("kind") not in ("rating", "pick"):
        return ()
    return [(answer["sample"], answer["value"]) for answer in line["answers"]]
