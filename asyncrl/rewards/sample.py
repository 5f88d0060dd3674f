"""Defines the sample that a reward function gets, and the values that it may return."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Self

from asyncrl.errors import RewardError
from asyncrl.protocols.answer_text import split_thoughts
from asyncrl.protocols.named_columns import Columns, missing_column

Value = float | dict[str, float] | None
"""A reward, named terms whose sum it is, or None for a sample that cannot be scored."""

TokenRewards = Sequence[float]
"""A reward for each sampled token, from a function with `by_token = true`."""

OfSample = Callable[["Sample"], Value | TokenRewards | Awaitable[Value | TokenRewards]]
Function = Callable[[Any], Any]
"""An OfSample; where the config says `group = true`, a function of a list of samples that returns as many values."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion. prompt: text or chat messages, as in the row. text: the completion, before a stop string if one
    ended it. row: all columns of the prompt's row. member: its number in the group; -1: ReMax's greedy answer. finish:
    "stop" | "stop_string" | "length" | "abort", or why an episode ended. tokens: sampled tokens. given: tokens that an
    environment wrote between them.

    In a run with an environment, `text` is the last answer of the policy. turns: the messages of the episode after its
    prompt, {"role", "content"}, those of the policy with the role "assistant". turn_rewards: of the environment, one
    for each answer of the policy.

    version: number of training steps behind the weights that sampled the last token. steps: of the whole run.

    In a run with a function by token, token_ids and token_texts are the sampled tokens, each decoded alone; a piece of
    a character is a replacement character. turn_tokens: of an episode, how many of them each answer has. A run with a
    function of TRL has token_ids and turn_tokens too.

    opened: whether the chat template, or the prompt, had opened thoughts in which `text` begins; a message in `turns`
    that began so has "opened": True."""

    prompt: str | list[dict[str, Any]]
    text: str
    row: dict[str, Any]
    group: int
    member: int
    finish: str
    tokens: int
    turns: list[dict[str, Any]] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)
    turn_tokens: list[int] = field(default_factory=list)
    given: int = 0
    version: int = 0
    steps: int = 0
    opened: bool = False

    @property
    def answer(self) -> str:
        """Returns the text behind the thoughts; nothing where thoughts do not end."""
        return split_thoughts(self.text, self.opened)[1]


class RowError(RewardError):
    """Reports a row that lacks what a template of ours needs of a column, so that no answer to its prompt can be
    scored. advice: what to do, at the start of a run."""

    def __init__(self, column: str, text: str, advice: str = "correct the row, or remove it") -> None:
        super().__init__(text)
        self.column = column
        self.advice = advice

    @classmethod
    def missing(cls, column: str, row: Mapping[str, Any], text: str = "") -> Self:
        """Returns the error for a column that a row lacks. text: goes before it."""
        advice = f'write task.columns = {{ {column} = "COLUMN OF YOURS" }}'
        return cls(column, text + missing_column(column, row), advice)


class UnjudgedError(RewardError):
    """Reports an answer that a template of ours could not judge, which counts 0: what the policy writes ends no run."""


BAD_ROW = "bad_row"
"""The reason of a drop of samples whose row cannot be scored."""
CheckRow = Callable[[Mapping[str, Any]], object]
"""Raises RowError, or TaskError about tests of programs, for a row that a template cannot score."""


@dataclass(frozen=True, slots=True)
class OfRow:
    """A template that compares samples with what their row holds. wanted: reads that from a row, and raises RowError
    where there is no such thing, at the start of a run and for each sample. score: compares a sample with it. warm_up:
    starts what it needs, so that a call's deadline is for its answer alone."""

    wanted: CheckRow
    score: Callable[[Sample, Any], float]
    warm_up: Callable[[], None] = lambda: None

    @property
    def check_row(self) -> CheckRow:
        return self.wanted

    def __call__(self, sample: Sample) -> float:
        return self.score(sample, self.wanted(sample.row))


def with_columns(sample: Sample) -> Sample:
    """Returns a copy of the sample whose row is `Columns`, of which a function may change any part."""
    return replace(sample, row=Columns(deepcopy(dict(sample.row))))


@dataclass(frozen=True, slots=True)
class Logged:
    """A value that a function returns, with further terms of the sample, which are no part of its reward."""

    value: Value
    terms: dict[str, float]


@dataclass(frozen=True, slots=True)
class FunctionResult:
    """Result of a reward function for one sample. reason: why there is no value, or "". traceback: of its error.
    tokens: of a function by token, the rewards of the sampled tokens, whose sum is the value. failed_together: number
    of samples of a call that failed for a whole group; 0 for a reason that is of this sample. logged: further terms of
    the sample, which are no part of the reward. of_row: whether the row is why. unjudged: a template of ours hung or
    crashed at this answer, which counts 0, for what the policy writes ends no run."""

    value: Value = None
    reason: str = ""
    traceback: str = ""
    tokens: tuple[float, ...] = ()
    failed_together: int = 0
    logged: dict[str, float] = field(default_factory=dict)
    of_row: bool = False
    unjudged: bool = False
