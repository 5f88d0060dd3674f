"""Defines what is read of a policy's answer: calls of tools, mistakes in calls, and the text beside them."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.protocols.answer_text import split_thoughts

LARGEST = 2**17
"""Characters of an answer that is read; a longer one is a mistake. A thousand tokens have some
4,000. Reading so many numbers takes a second."""

DEEPEST = 64
"""Brackets inside brackets of a call. Readers recurse no deeper, so no answer exhausts the stack."""

MOST = 128
"""Calls and mistakes that are read of one answer; the rest of it is not read."""


FENCE = re.compile(r"```\w*")


class MalformedCall(ValueError):
    """Reports a call that cannot be read; the message is for the model."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as the policy wrote it. arguments: plain values, as in JSON."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Holds what an answer of the policy has. content: its text without the calls. mistakes: a message for each call
    that cannot be read."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    mistakes: tuple[str, ...] = ()


class Reading:
    """Collects what a reader finds in an answer, in order."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._mistakes: list[str] = []

    @property
    def full(self) -> bool:
        """Returns whether no further call is read."""
        return len(self._calls) + len(self._mistakes) >= MOST

    def add_text(self, text: str) -> None:
        """Adds text beside the calls. The fence of a block of code that has nothing but calls is no text."""
        text = text.strip()
        if text and not FENCE.fullmatch(text):
            self._content.append(text)

    def add_call(self, call: ToolCall) -> None:
        """Adds a call."""
        self._calls.append(call)

    def add_mistake(self, mistake: str) -> None:
        """Adds a message about a call that cannot be read."""
        self._mistakes.append(mistake)

    def result(self) -> ToolCalls:
        """Returns all that was found."""
        return ToolCalls("\n".join(self._content), tuple(self._calls), tuple(self._mistakes))


def parse(text: str, read: Callable[[str, Reading], None], opened: bool = False) -> ToolCalls:
    """Returns what `read` finds in an answer, behind its thoughts; an answer that is too long to be read is a mistake.
    opened: whether the prompt had opened the thoughts. Never raises."""
    if len(text) > LARGEST:
        return ToolCalls(text, (), (f"the answer has {len(text)} characters; at most {LARGEST} are read",))
    reading = Reading()
    thoughts, rest = split_thoughts(text, opened)
    reading.add_text(thoughts)
    read(rest, reading)
    return reading.result()


SHOWN = 60


def shown(value: Any) -> str:
    """Returns a value of the model's as messages show it: its beginning."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
