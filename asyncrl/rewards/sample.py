"""Defines the sample that a reward function gets, and the values that it may return."""

from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.protocols.named_columns import Columns
from asyncrl.protocols.thoughts import split_thoughts

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
    the sample, which are no part of the reward."""

    value: Value = None
    reason: str = ""
    traceback: str = ""
    tokens: tuple[float, ...] = ()
    failed_together: int = 0
    logged: dict[str, float] = field(default_factory=dict)
