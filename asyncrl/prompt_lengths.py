"""Prompts of too many tokens, found while the fleet starts.

The controller has no tokenizer and generation sees no prompt but those it is asked for. So the controller writes down
the prompts with the most characters, and generation, once it has its tokenizer, counts their tokens.
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
            for number in heapq.nlargest(COUNTED, _spread(prompts), key=lambda number: _characters(prompts, number)):
                line = {"where": f"{source}, row {number}", "prompt": prompts.row(number).prompt}
                lines.write(json.dumps(line, default=str) + "\n")


def refuse_too_long(path: Path, tokenize: Callable[[Messages], Sized], most: int) -> None:
    """Raises TaskError when a prompt that was written to `path` has over `most` tokens; names the longest one."""
    with path.open(encoding="utf-8") as lines:
        counted = [(len(tokenize(line["prompt"])), line["where"]) for line in map(json.loads, lines)]
    too_long = [(tokens, where) for tokens, where in counted if tokens > most]
    if too_long:
        tokens, where = max(too_long)
        others = f" ({len(too_long) - 1} more are too long as well)" if len(too_long) > 1 else ""
        raise TaskError(f"{where}: {too_long_text(tokens, most)}{others}")


def too_long_text(tokens: int, most: int) -> str:
    """What is wrong with a prompt, and what to do."""
    return (
        f"the prompt has {tokens} tokens and task.max_prompt_tokens is {most}: shorten it, or write "
        f"max_prompt_tokens = {tokens}"
    )


def _spread(prompts: Prompts) -> Iterator[int]:
    rows = len(prompts)
    return (place * rows // min(rows, LOOKED_AT) for place in range(min(rows, LOOKED_AT)))


def _characters(prompts: Prompts, number: int) -> int:
    prompt: str | list[dict[str, Any]] = prompts.row(number).prompt
    return len(prompt) if isinstance(prompt, str) else sum(len(str(message["content"])) for message in prompt)
