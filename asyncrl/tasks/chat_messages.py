"""Checks chat messages and tools of a row, and brings them into the form that every chat template takes."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.reading.pictures import checked_picture, is_picture

Message = dict[str, Any]
Messages = str | list[Message]
TOOLS = "tools"
"""Column of a row with the JSON schemas of functions that the model may call."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that chat templates know."""
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant"}
"""Names that other libraries give to roles."""


def parsed(prompt: Any) -> Any:
    """Returns the messages that a text holds as JSON, as files without lists have them, or the prompt as it is."""
    if isinstance(prompt, str) and prompt.startswith("[{"):
        with suppress(ValueError, RecursionError):
            found = json.loads(prompt)
            if all(isinstance(each, dict) and {"role", "content"} & set(each) == {"role", "content"} for each in found):
                return found
    return prompt


def no_prompt(prompt: Any) -> str:
    """Returns why this is neither a text nor messages; "" where it is. A text must not be blank, nor must all messages
    be."""
    if isinstance(prompt, str) and prompt.startswith("[{'role'"):
        return f"this text has messages as Python shows them, which a model would read as they are: {prompt:.80}"
    if isinstance(prompt, str):
        return "" if _is_visible(prompt) else f"this is {prompt!r:.200}"
    if not isinstance(prompt, list) or not prompt:
        return f"this is {prompt!r:.200}"
    wrong = next(filter(None, (_no_message(each, number) for number, each in enumerate(prompt, 1))), "")
    contents = [] if wrong else [each.get("content") for each in prompt]
    if wrong or any(_is_visible(content) if isinstance(content, str) else content for content in contents):
        return wrong
    return f"this is {prompt!r:.200}"


def _is_visible(text: str) -> bool:
    """Returns whether a text has a character that shows: no space, control or formatting character."""
    return any(character.isprintable() and not character.isspace() for character in text)


def _no_message(message: Any, number: int) -> str:
    """Returns why this is no message; "" where it is."""
    if not isinstance(message, dict):
        return f"message {number} is {message!r:.80}"
    if "role" not in message and "from" in message:
        return f'message {number} has "from" and "value" instead: rename them, as in a function FILE.py:NAME'
    if not isinstance(role := message.get("role"), str) or not role.strip():
        return f"the role of message {number} is {role!r:.80}"
    known = OTHER_ROLES.get(role.strip().lower(), role.strip().lower())
    if role != known and known in ROLES:
        return f'the role of message {number} is "{role}", which templates call "{known}"'
    is_whole = "content" in message or message.get("tool_calls")
    return "" if is_whole else f'message {number} ({role}) has no "content"'


def ends_with_answer(prompt: Messages) -> bool:
    """Returns whether the last message of a prompt is the beginning of an answer."""
    return not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"


def as_messages(text: str, system: str = "") -> list[Message]:
    """Returns a text as the message of a user, after a system message if there is one."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def plain_messages(messages: list[Message], where: str, folder: Path = Path()) -> list[Message]:
    """Returns messages whose contents are texts; parts that are texts are joined, unless there is a picture among them.
    folder: where paths of pictures begin. Raises TaskError, which begins with `where`, for other contents, which
    templates would write as Python shows them."""
    return [_with_text(message, f"{where}: message {number}", folder) for number, message in enumerate(messages, 1)]


def _with_text(message: Message, where: str, folder: Path) -> Message:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return {**message, "content": content}
    where = f"{where} ({message['role']})"
    if not isinstance(content, list):
        raise TaskError(f"{where}: its content is {content!r:.80}, and a model reads text: write a text")
    if not any(map(is_picture, content)):
        return {**message, "content": "".join(_text_of(part, where) for part in content)}
    parts = [
        checked_picture(part, folder, where) if is_picture(part) else {"type": "text", "text": _text_of(part, where)}
        for part in content
    ]
    return {**message, "content": parts}


def _text_of(part: Any, where: str) -> str:
    """Returns the text of a part, which is one or has one: {"type": "text", "text": ...}."""
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise TaskError(f"{where}: a part of its content is {kind}: {part!r:.80}; asyncrl reads texts and images")


def tools_of(columns: Mapping[str, Any], is_text: bool, where: str) -> list[dict[str, Any]]:
    """Returns the tools of a row, which are a list or a JSON text of one. is_text: the prompt is no chat. Raises
    TaskError, which begins with `where`, for others."""
    found = columns.get(TOOLS)
    if isinstance(found, str) and found.strip():
        with suppress(ValueError):  # It is refused below, as any other text.
            found = json.loads(found)
    if not found:
        return []
    advice = f'; write task.columns = {{ {TOOLS} = "" }} if they are something else'
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise TaskError(
            f"{where}: the column {TOOLS} is no list of JSON schemas of functions, which the chat template would show: "
            f"{found!r:.80}{advice}"
        )
    if is_text:
        raise TaskError(
            f"{where}: the row has {TOOLS}, which only a chat template shows, and its prompt is a text: write "
            f'task.text_prompts = "chat", or messages{advice}'
        )
    return found
