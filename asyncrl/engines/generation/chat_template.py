"""Chat messages as text by a model's template, which is code of strangers: it may be missing, fail, or rewrite what it
is given."""

from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import TemplateError

from asyncrl.errors import TaskError

EXCERPT = 60
"""Characters of a message that an error quotes."""

Message = dict[str, Any]


def rendered(tokenizer: Any, messages: Sequence[Message]) -> str:
    """`messages` with the mark where the answer begins.

    Raises:
        TaskError: there is no template, it fails on these messages, or not all they say stands in the text.
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
    """Raises TaskError when a message is left out or changed in `text`: some templates drop the thoughts of earlier
    answers, and the model would see another history than was meant."""
    for number, message in enumerate(messages, 1):
        for said in _said(message):
            if said.strip() not in text:
                raise TaskError(
                    f"the model's chat template leaves out or changes a part of message {number} ({message['role']}), "
                    f"{_quoted(said)}: the model would see another history than the row has; write the message as the "
                    "template shows it (without <think> parts where it drops them), or the prompt as text"
                )


def _said(message: Message) -> Iterator[str]:
    content = message["content"]
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def _quoted(said: str) -> str:
    return repr(said if len(said) <= EXCERPT else said[:EXCERPT] + "...")
