"""Leaves out or shortens the prompts of a source that have more tokens than a run has room for, and counts them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.chat_messages import TOOLS, Messages
from asyncrl.tasks.prompt_rows import MixedPrompts, PromptRows, Row

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
    kept, shortened, long = list[int](), dict[int, Messages](), 0
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
        longest, text = 0, prompt
    else:
        longest = max(range(len(prompt)), key=lambda place: len(prompt[place]["content"] or ""))
        text = prompt[longest]["content"] or ""

    def without(characters: int) -> Messages:
        if isinstance(prompt, str):
            return text[characters:]
        return [*prompt[:longest], {**prompt[longest], "content": text[characters:]}, *prompt[longest + 1 :]]

    too_few, enough = 0, len(text) - 1
    if enough < 1 or not fits(without(enough)):
        raise TaskError(f"{where}: the prompt is too long, also without most of its longest message")
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(without(middle)):
            enough = middle
        else:
            too_few = middle
    return without(enough)
