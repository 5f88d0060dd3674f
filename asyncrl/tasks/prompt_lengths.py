"""Finds prompts of too many tokens or none, or that the tokenizer cannot render, while the fleet starts.
The controller has no tokenizer. It writes the prompts with the most characters, and the first prompt of each shape of
conversation (chat templates depend on it), to a file. Generation counts their tokens when it has its tokenizer."""

import heapq
import json
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.chat_messages import TOOLS, Messages
from asyncrl.tasks.prompt_rows import PromptRows
from asyncrl.tasks.reading.pictures import with_pictures_read

LOOKED_AT = 20_000
"""Rows of a source whose characters are counted, evenly spread; so many rows of a Parquet file take a second."""

COUNTED = 64
"""Prompts of a source whose tokens are counted, because the prompt with the most characters need not have the most
tokens; also the largest number of shapes of conversations."""

THOUGHTS = "<think>"
"""Beginning of thoughts, which some templates remove from earlier answers."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Bounds of a row. prompt, answer: largest numbers of tokens by the config. context: positions of the model. key:
    of the config, that bounds what follows the prompt."""

    prompt: int
    answer: int
    context: int | None = None
    key: str = "generation.max_new_tokens"

    def mistake(self, tokens: int) -> str | None:
        """Returns what is wrong with a prompt of so many tokens, and what to do; None if it fits."""
        if tokens == 0:
            return "the prompt has no tokens: nothing of it is left by the model's tokenizer; write what to answer"
        if self.context is not None and tokens + self.answer > self.context:
            name = self.key.rpartition(".")[2]
            fewer = f", or write {name} = {self.context - tokens}" if tokens < self.context else ""
            return (
                f"the prompt has {tokens} tokens, and with {self.key} = {self.answer} its answer may "
                f"end beyond the {self.context} positions that the model was made for (max_position_embeddings): "
                f"shorten it{fewer}"
            )
        if tokens > self.prompt:
            return (
                f"the prompt has {tokens} tokens and task.max_prompt_tokens is {self.prompt}: shorten it, or write "
                f"max_prompt_tokens = {tokens}"
            )
        return None


def write_longest(path: Path, sources: Mapping[str, PromptRows]) -> None:
    """Writes one JSON object a line: {where, prompt, tools}. sources: prompts by config key."""
    with path.open("w", encoding="utf-8") as lines:
        for key, prompts in sources.items():
            for number in longest_rows(prompts):
                prompt, columns = prompts.row(number)
                asked = with_pictures_read(prompt)
                line = {"where": f"{key}: {prompts.where(number)}", "prompt": asked, TOOLS: columns.get(TOOLS)}
                lines.write(json.dumps(line, default=str) + "\n")


def refuse_what_has_no_room(
    path: Path, tokenize: Callable[[Messages, Sequence[dict[str, Any]]], Sized], room: TokenBudget
) -> None:
    """Raises TaskError with the longest prompt in `path` of too many tokens or none, or that `tokenize` refuses."""
    refused: list[tuple[int, str]] = []
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        try:
            tokens = len(tokenize(line["prompt"], line[TOOLS] or ()))
        except TaskError as error:
            raise TaskError(f"{line['where']}: {error}") from None
        if room.mistake(tokens):
            refused.append((tokens, line["where"]))
    if refused:
        tokens, where = max(refused)
        others = f" ({len(refused) - 1} more do not fit either)" if len(refused) > 1 else ""
        raise TaskError(f"{where}: {room.mistake(tokens)}{others}")


def longest_rows(prompts: PromptRows) -> list[int]:
    """Returns the rows of the longest prompts, and of the first prompt of each shape of conversation."""
    sizes: list[tuple[int, int]] = []
    shapes: dict[tuple[tuple[str, bool], ...], int] = {}
    looked_at = min(len(prompts), LOOKED_AT)
    for number in (place * len(prompts) // looked_at for place in range(looked_at)):
        prompt, columns = prompts.row(number)
        texts = [("", prompt)] if isinstance(prompt, str) else [(each["role"], str(each["content"])) for each in prompt]
        tools = len(str(columns[TOOLS])) if columns.get(TOOLS) else 0
        sizes.append((tools + sum(len(text) for _, text in texts), -number))
        if len(shapes) < COUNTED and not isinstance(prompt, str):
            shapes.setdefault(tuple((role, THOUGHTS in text) for role, text in texts), number)
    longest = [-negative for _, negative in heapq.nlargest(COUNTED, sizes)]
    return longest + [number for number in shapes.values() if number not in longest]
