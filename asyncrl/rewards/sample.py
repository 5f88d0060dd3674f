"""What a reward function sees, and what it may return."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

Value = float | dict[str, float] | None
"""A reward, named terms whose sum it is, or None for a sample that cannot be scored."""

OfSample = Callable[["Sample"], Value | Awaitable[Value]]
OfGroup = Callable[[list["Sample"]], Sequence[Value] | Awaitable[Sequence[Value]]]
Function = Callable[[Any], Any]
"""An OfSample, or an OfGroup where the config says `group = true`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion.

    prompt: text or chat messages, as in the row. text: the completion, before a stop string if one ended it.
    row: all columns of the prompt's row. finish: "stop" | "stop_string" | "length" | "abort". tokens: sampled tokens.
    """

    prompt: str | list[dict[str, Any]]
    text: str
    row: dict[str, Any]
    group: int
    member: int
    finish: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a function said about one sample. reason: why there is no value; traceback: of what it raised."""

    value: Value = None
    reason: str = ""
    traceback: str = ""
