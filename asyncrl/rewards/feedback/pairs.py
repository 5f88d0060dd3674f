"""Makes pairs of answers to one prompt out of ratings and picks, for a reward model to learn from."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.rewards.sample import Sample

# Names the answers that a person is asked about, and what a person said about them.


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


MOST_ANSWERS = 16
"""Rated answers of one prompt that are compared with each other, drawn by chance: 120 pairs."""


@dataclass(frozen=True, slots=True)
class RatedAnswer:
    """An answer as a person rated it. turns: of an episode, its messages as JSON. finish: why its sampling ended.
    tokens: ids of the conversation as the policy saw it."""

    text: str
    turns: str
    finish: str
    tokens: tuple[int, ...] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt, by their numbers among its answers. wins: 1 if the first is better, 0.5 if they are
    equal."""

    first: int
    second: int
    wins: float


@dataclass(slots=True)
class ComparedPrompt:
    """A prompt with the answers that were compared, and the comparisons."""

    prompt: Prompt
    answers: list[RatedAnswer] = field(default_factory=list)
    pairs: list[Preference] = field(default_factory=list)

    def number(self, answer: RatedAnswer) -> int:
        """Returns the number of an answer, which is added if it is new."""
        if answer not in self.answers:
            self.answers.append(answer)
        return self.answers.index(answer)

    @property
    def decided(self) -> int:
        """Number of pairs of which one answer is better."""
        return sum(pair.wins != EQUAL for pair in self.pairs)


def compared_prompts(lines: Iterable[dict[str, Any]], seed: int = 0) -> list[ComparedPrompt]:
    """Returns all comparisons in the lines of ratings files, by prompt: picks, and pairs of answers with different
    ratings. Lines without tokens are left out."""
    draw = random.Random(seed)
    prompts: dict[str, ComparedPrompt] = {}
    rated: dict[str, dict[RatedAnswer, float]] = {}
    for line in lines:
        if line.get("kind") not in ("rating", "pick") or lacks_tokens(line):
            continue
        key = json.dumps(line["prompt"], sort_keys=True)
        found = prompts.setdefault(key, ComparedPrompt(line["prompt"]))
        if line["kind"] == "rating":
            (answer,) = line["answers"]
            rated.setdefault(key, {})[_rated_answer(answer)] = answer["value"]
        else:
            _add_pick(found, line["answers"])
    for key, values in rated.items():
        _add_ratings(prompts[key], values, draw)
    return [each for each in prompts.values() if each.pairs]


def lacks_tokens(line: dict[str, Any]) -> bool:
    """Returns whether an earlier version wrote a rating or pick, which kept no tokens."""
    return not all(answer.get("tokens") for answer in line["answers"])


def _rated_answer(answer: dict[str, Any]) -> RatedAnswer:
    turns = json.dumps(answer.get("turns", []), sort_keys=True)
    return RatedAnswer(answer["text"], turns, answer["finish"], tuple(map(int, answer["tokens"])))


def _add_pick(prompt: ComparedPrompt, answers: Sequence[dict[str, Any]]) -> None:
    first, second = (_rated_answer(answer) for answer in answers)
    if first != second:
        wins = 1.0 if answers[0]["value"] > answers[1]["value"] else EQUAL
        prompt.pairs.append(Preference(prompt.number(first), prompt.number(second), wins))


def _add_ratings(prompt: ComparedPrompt, values: dict[RatedAnswer, float], draw: random.Random) -> None:
    """Adds the pairs of answers with different ratings. Equal ratings say little: a scale has few steps."""
    chosen = list(values.items())
    if len(chosen) > MOST_ANSWERS:
        chosen = draw.sample(chosen, MOST_ANSWERS)
    for (one, value), (other, others) in combinations(chosen, 2):
        if value != others:
            better, worse = (one, other) if value > others else (other, one)
            prompt.pairs.append(Preference(prompt.number(better), prompt.number(worse), 1.0))


def split(
    prompts: Sequence[ComparedPrompt], share: float, seed: int
) -> tuple[list[ComparedPrompt], list[ComparedPrompt]]:
    """Divides prompts by chance into those to learn from and a held-out share, at least one, of those with
    decided pairs."""
    decided = [each for each in prompts if each.decided]
    random.Random(seed).shuffle(decided)
    count = max(1, round(share * len(decided)))
    return decided[count:] + [each for each in prompts if not each.decided], decided[:count]


def batches(prompts: Sequence[ComparedPrompt], size: int) -> Iterator[Sequence[ComparedPrompt]]:
    """Yields the prompts in batches; all pairs of a prompt are in one."""
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]
