"""Writes calls and their results as chat messages, for chat templates and transcripts."""

import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import Any

from asyncrl.environments.observation import Message
from asyncrl.environments.tools.parsed_calls import ToolCalls


def assistant_message(found: ToolCalls) -> Message:
    """Returns an answer of the policy with its calls, as chat templates take it."""
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}} for call in found.calls
    ]
    return {"role": "assistant", "content": found.content} | ({"tool_calls": calls} if calls else {})


def tool_message(name: str, content: str) -> Message:
    """Returns the result of a call. name: of the tool, "" where the call could not be read."""
    return {"role": "tool", "content": content} | ({"name": name} if name else {})


def as_text(value: Any) -> str:
    """Returns a tool's result as the model reads it: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return list(value)
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def cut(text: str, max_bytes: int) -> str:
    """Returns text of at most `max_bytes` bytes of UTF-8, with a marker at its end when something is left out."""
    if 4 * len(text) <= max_bytes:
        return text
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return text
    marker = f"... [cut: the result has {len(data)} bytes]"
    kept = max_bytes - len(marker)
    if kept <= 0:
        return data[:max_bytes].decode(errors="ignore")
    return data[:kept].decode(errors="ignore") + marker


def joined(messages: Sequence[Message]) -> str:
    """Returns results as the text of one user message, for chat templates without a role for tools."""
    return "\n".join(
        f"{message['name']}: {message['content']}" if "name" in message else message["content"] for message in messages
    )
