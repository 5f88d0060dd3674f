"""Finds prompts of too many tokens or none, or that the tokenizer cannot render, while the fleet starts.
The controller has no tokenizer. It writes the prompts with the most characters, and the first prompt of each shape of
conversation (chat templates depend on it), to a file. Generation counts their tokens when it has its tokenizer."""

import heapq
import json
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.chat_messages import TOOLS, Messages
from asyncrl.tasks.pictures import with_pictures_read
from asyncrl.tasks.prompt_rows import MixedPrompts, PromptRows, Row

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


# Leaves out or shortens the prompts of a source that have more tokens than a run has room for, and counts them.


CountTokens = Callable[[Messages, Sequence[dict[str, Any]]], int]
"""Counts the tokens of a prompt with these tools."""
FindMark = Callable[[str], str]
"""Returns the first special token that a text has as text; "" where it has none."""


@dataclass(frozen=True, slots=True)
class FittingPrompts:
    """The rows of `prompts` that are left. numbers: of these in `prompts`. shortened: prompts by that number."""

    prompts: PromptRows
    numbers: Sequence[int]
    shortened: Mapping[int, Messages]
    notes: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return self.prompts.source

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, number: int) -> Row:
        row = self.prompts.row(self.numbers[number])
        return row._replace(prompt=self.shortened.get(self.numbers[number], row.prompt))

    def where(self, number: int) -> str:
        return self.prompts.where(self.numbers[number])


def fitting(
    prompts: PromptRows, count: CountTokens, limit: int, *, shorten: bool, mark: FindMark | None = None
) -> PromptRows:
    """Returns the rows whose prompts have up to `limit` tokens; of others the prompt is shortened, or they are left
    out. Raises TaskError when none is left, or a prompt cannot be shortened without the loss of a mark of its chat."""
    if isinstance(prompts, MixedPrompts):
        parts = tuple(fitting(part, count, limit, shorten=shorten, mark=mark) for part in prompts.parts)
        return MixedPrompts(parts, prompts.weights)
    kept = list[int]()
    shortened = dict[int, Messages]()
    long = 0
    for number in range(len(prompts)):
        prompt, columns = prompts.row(number)
        tools = columns.get(TOOLS) or ()
        if count(prompt, tools) > limit:
            long += 1
            if not shorten:
                continue
            where = prompts.where(number)
            shortened[number] = _shortened(prompt, partial(_fits, count, limit, tools), where)
            if isinstance(prompt, str) and mark is not None:
                _refuse_lost_mark(mark(prompt[: len(prompt) - len(shortened[number])]), where)
        kept.append(number)
    if not kept:
        raise TaskError(
            f"{prompts.source}: all {long} prompts have more than {limit} tokens, so none is left; raise "
            'task.max_prompt_tokens, lower generation.max_new_tokens, or write task.long_prompts = "truncate"'
        )
    done = "their beginning is cut off" if shorten else "they are left out"
    note = f"{prompts.source}: {long} of {len(prompts)} prompts have more than {limit} tokens; {done}"
    return FittingPrompts(prompts, kept, shortened, (*prompts.notes, *([note] if long else [])))


def _refuse_lost_mark(lost: str, where: str) -> None:
    """Raises TaskError for a mark that a rendered text would lose: the model would see an answer to no turn."""
    if lost:
        raise TaskError(
            f"{where}: the prompt is a text that a chat template has rendered, and without its beginning it would lose "
            f'{lost}: write it as messages, or task.long_prompts = "skip"'
        )


def _fits(count: CountTokens, limit: int, tools: Sequence[dict[str, Any]], prompt: Messages) -> bool:
    return count(prompt, tools) <= limit


def _shortened(prompt: Messages, fits: Callable[[Messages], bool], where: str) -> Messages:
    """Returns a prompt without the beginning of its text, or of its longest message."""
    if isinstance(prompt, str):
        longest = 0
        text = prompt
    else:
        longest = max(range(len(prompt)), key=lambda place: len(prompt[place]["content"] or ""))
        text = prompt[longest]["content"] or ""

    def without(characters: int) -> Messages:
        if isinstance(prompt, str):
            return text[characters:]
        return [*prompt[:longest], {**prompt[longest], "content": text[characters:]}, *prompt[longest + 1 :]]

    too_few = 0
    enough = len(text) - 1
    if enough < 1 or not fits(without(enough)):
        raise TaskError(f"{where}: the prompt is too long, also without most of its longest message")
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(without(middle)):
            enough = middle
        else:
            too_few = middle
    return without(enough)
