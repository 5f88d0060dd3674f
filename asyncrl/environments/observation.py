"""Defines what an environment answers: `async reset(row, seed)` and `async step(message)` return an Observation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""A chat message: {"role", "content"}, and what a chat template knows besides, e.g. the `name` of a tool."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Says what the policy is shown next. text: the text of one user message, or chat messages with roles of their own;
    for `reset` the prompt. reward: of the turn that it answers. done: the episode has ended. info: of `step`, a
    few plain values for people and reward functions: they are `info` of the last message in `turns`, also in
    samples.jsonl, and no model is shown them. A text "" that ends the episode is no message. tools: of `reset`, or with
    `follows`: JSON schemas of the functions that the policy may call. follows: begins a new context, in which the
    policy sees nothing of before: `text` is a whole conversation where this is 0, else it follows the policy's answer
    of this turn, from 1."""

    text: str | list[Message]
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    follows: int | None = None
