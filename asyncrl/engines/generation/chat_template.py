"""Renders chat messages to text with the template of a model.

Templates are third-party code: one may be missing, fail, or rewrite the messages. All three raise TaskError.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import TemplateError

from asyncrl.errors import TaskError

EXCERPT = 60
"""Longest quote of a message in an error, in characters."""

Message = dict[str, Any]


def render_chat(tokenizer: Any, messages: Sequence[Message]) -> str:
    """Renders the messages, followed by the template's mark for the start of an answer.

    Raises:
        TaskError: there is no template, it fails on these messages, or it changes or omits a part of them.
    """
    if not tokenizer.chat_template:
        raise TaskError(
            "the prompt is a list of messages and the model's tokenizer has no chat template: write the prompts as "
            "text, without task.system, or use a model with a chat template (most -Instruct models have one)"
        )
    try:
        text = str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise TaskError(
            f"the model's chat template fails on this prompt: {type(error).__name__}: {error}; write messages that it "
            "takes, or the prompt as text"
        ) from error
    refuse_rewritten(messages, text)
    return text


def refuse_rewritten(messages: Sequence[Message], text: str) -> None:
    """Raises TaskError when `text` omits or changes a message.

    Some templates drop the thoughts of earlier answers; the model would then see another history than the row has.
    """
    for number, message in enumerate(messages, 1):
        for part in _text_parts(message):
            if part.strip() not in text:
                raise TaskError(
                    f"the model's chat template leaves out or changes a part of message {number} ({message['role']}), "
                    f"{_quote(part)}: the model would see another history than the row has; write the message as the "
                    "template shows it (without <think> parts where it drops them), or the prompt as text"
                )


def _text_parts(message: Message) -> Iterator[str]:
    content = message["content"]
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def _quote(part: str) -> str:
    return repr(part if len(part) <= EXCERPT else part[:EXCERPT] + "...")
