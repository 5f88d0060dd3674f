"""Prompts of too many tokens, or that the model's tokenizer cannot render, found while the fleet starts.

The controller has no tokenizer and generation sees no prompt but those it is asked for. So the controller writes down
the prompts with the most characters and the first that is chat messages, and generation, once it has its tokenizer,
counts their tokens.
"""

import heapq
import json
from collections.abc import Callable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.prompts import Messages, Prompts

LOOKED_AT = 20_000
"""Rows of a source whose characters are counted, evenly spread: those of a large Parquet file take a second."""

COUNTED = 64
"""Prompts of a source whose tokens are counted: the one with the most characters need not have the most tokens."""


def write_longest(path: Path, sources: Mapping[str, Prompts]) -> None:
    """One JSON object a line: {where, prompt}. sources: by what messages call them."""
    with path.open("w", encoding="utf-8") as lines:
        for source, prompts in sources.items():
            for number in _worth_counting(prompts):
                line = {"where": f"{source}, row {number}", "prompt": prompts.row(number).prompt}
                lines.write(json.dumps(line, default=str) + "\n")


def refuse_too_long(path: Path, tokenize: Callable[[Messages], Sized], most: int) -> None:
    """Raises TaskError when a prompt that was written to `path` has over `most` tokens; names the longest one. The same
    when `tokenize` refuses one."""
    with path.open(encoding="utf-8") as lines:
        counted = [(_tokens(line, tokenize), line["where"]) for line in map(json.loads, lines)]
    too_long = [(tokens, where) for tokens, where in counted if tokens > most]
    if too_long:
        tokens, where = max(too_long)
        others = f" ({len(too_long) - 1} more are too long as well)" if len(too_long) > 1 else ""
        raise TaskError(f"{where}: {too_long_text(tokens, most)}{others}")


def _tokens(line: Mapping[str, Any], tokenize: Callable[[Messages], Sized]) -> int:
    try:
        return len(tokenize(line["prompt"]))
    except TaskError as refused:
        raise TaskError(f"{line['where']}: {refused}") from None


def too_long_text(tokens: int, most: int) -> str:
    """What is wrong with a prompt, and what to do."""
    return (
        f"the prompt has {tokens} tokens and task.max_prompt_tokens is {most}: shorten it, or write "
        f"max_prompt_tokens = {tokens}"
    )


def _worth_counting(prompts: Prompts) -> list[int]:
    """The longest; and the first that is messages, where none of the longest is."""
    sizes: list[tuple[int, int]] = []
    first_chat: list[int] = []
    for number in _spread(prompts):
        prompt = prompts.row(number).prompt
        sizes.append((_characters(prompt), -number))
        if not first_chat and not isinstance(prompt, str):
            first_chat = [number]
    longest = [-negative for _, negative in heapq.nlargest(COUNTED, sizes)]
    return longest + [number for number in first_chat if number not in longest]


def _spread(prompts: Prompts) -> Iterator[int]:
    rows = len(prompts)
    return (place * rows // min(rows, LOOKED_AT) for place in range(min(rows, LOOKED_AT)))


def _characters(prompt: Messages) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(str(message["content"])) for message in prompt)
