"""Checks and holds the rows that prompts come from."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from asyncrl.errors import TaskError
from asyncrl.protocols.prompt_row import PromptRow

Messages = str | list[dict[str, Any]]
OTHER_NAMES = ("prompts", "question", "problem", "query", "instruction", "input", "messages", "text")
"""Names that other libraries give to the column `prompt`."""


class Row(NamedTuple):
    """One row. prompt: text or chat messages. columns: the row in plain values; rewards get it as `sample.row`."""

    prompt: Messages
    columns: PromptRow


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Holds rows by number. source: its name in messages. system: message put before every prompt."""

    rows: Sequence[Mapping[str, Any]]
    source: str
    system: str = ""

    def __post_init__(self) -> None:
        if len(self.rows) == 0:
            raise TaskError(f"{self.source}: there are no rows")
        # Rows of another type are read on demand, maybe millions: only the first one is checked here.
        for number in range(len(self.rows) if isinstance(self.rows, list) else 1):
            self.row(number)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> Row:
        """Returns a row; raises TaskError if it has no prompt, or a value that cannot be sent to another process."""
        raw = self.rows[number]
        where = f"{self.source}, row {number}"
        if not isinstance(raw, Mapping):
            raise TaskError(f'{where}: a row is a table such as {{"prompt": ...}}, this is {type(raw).__name__}')
        if "prompt" not in raw:
            raise TaskError(f"{where}: {_no_prompt(list(raw))}")
        columns = {str(name): plain(value, f"{where}, column {name}") for name, value in raw.items()}
        if not _is_prompt(columns["prompt"]):
            raise TaskError(
                f'{where}: a prompt is text that is not empty, or a list of {{"role": ..., "content": ...}}, not all '
                f"empty; this is {repr(columns['prompt'])[:200]}"
            )
        return Row(with_system(columns["prompt"], self.system, where), PromptRow(columns))

    def first(self, count: int) -> list[tuple[Messages, dict[str, Any]]]:
        """Returns up to `count` rows from the beginning."""
        return [self.row(number) for number in range(min(count, len(self)))]


def with_system(prompt: Messages, system: str, where: str) -> Messages:
    """Returns a prompt with the system message before it; "" is none. Raises TaskError, which begins with `where`, for
    a prompt that has a system message of its own."""
    if not system:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if any(message["role"] == "system" for message in messages[:1]):
        raise TaskError(f"{where}: the prompt has a system message of its own; remove task.system")
    return [{"role": "system", "content": system}, *messages]


def plain(value: Any, where: str) -> Any:
    """Converts `value` to None, bool, int, float, str, bytes, lists and dicts, which can be sent to other processes;
    raises TaskError, which begins with `where`, if it holds something else."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case np.ndarray() | np.generic():
            return plain(value.tolist(), where)
        case list() | tuple():
            return [plain(item, where) for item in value]
        case Mapping():
            return {str(key): plain(item, where) for key, item in value.items()}
    kind = type(value).__name__
    raise TaskError(f"{where}: a value of type {kind} cannot be sent to reward functions; make it text or numbers")


def _no_prompt(found: list[str]) -> str:
    near = difflib.get_close_matches("prompt", found, 1, 0.6) or [name for name in OTHER_NAMES if name in found]
    closest = f'; the closest is "{near[0]}": rename it' if near else ""
    return (
        f'there is no column "prompt"; found are {", ".join(found) or "no columns"}{closest}'
        ", or write a function FILE.py:NAME that returns rows with a prompt"
    )


def _is_prompt(prompt: Any) -> bool:
    """Returns whether this is text or messages; text must not be blank, nor must all messages be."""
    if isinstance(prompt, str):
        return bool(prompt.strip())
    contents = []
    for message in prompt if isinstance(prompt, list) else ():
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            return False
        contents.append(message["content"])
    return any(content.strip() if isinstance(content, str) else content for content in contents)
