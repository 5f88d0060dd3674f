"""Prompts of too many tokens or none, or that the model's tokenizer cannot render, found while the fleet starts.

The controller has no tokenizer and generation sees no prompt but those it is asked for. So the controller writes down
the prompts with the most characters and the first of each shape of conversation, on which chat templates depend, and
generation, once it has its tokenizer, counts their tokens.
"""

import heapq
import json
from collections.abc import Callable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

from asyncrl.context import Room
from asyncrl.errors import TaskError
from asyncrl.tasks.prompts import Messages, Prompts

LOOKED_AT = 20_000
"""Rows of a source whose characters are counted, evenly spread: those of a large Parquet file take a second."""

COUNTED = 64
"""Prompts of a source whose tokens are counted: the one with the most characters need not have the most tokens. Also
the most shapes of conversations that are looked at."""

THOUGHTS = "<think>"
"""What some templates take out of earlier answers, with all up to its end."""

Shape = tuple[tuple[str, bool], ...]
"""Role of each message, and whether there are thoughts in it."""


def write_longest(path: Path, sources: Mapping[str, Prompts]) -> None:
    """One JSON object a line: {where, prompt}. sources: by what messages call them."""
    with path.open("w", encoding="utf-8") as lines:
        for source, prompts in sources.items():
            for number in _worth_counting(prompts):
                line = {"where": f"{source}, row {number}", "prompt": prompts.row(number).prompt}
                lines.write(json.dumps(line, default=str) + "\n")


def refuse_what_has_no_room(path: Path, tokenize: Callable[[Messages], Sized], room: Room) -> None:
    """Raises TaskError when a prompt that was written to `path` has too many tokens, or none; names the longest such
    one. The same when `tokenize` refuses one."""
    with path.open(encoding="utf-8") as lines:
        counted = [(_tokens(line, tokenize), line["where"]) for line in map(json.loads, lines)]
    refused = [(tokens, where) for tokens, where in counted if room.mistake(tokens)]
    if refused:
        tokens, where = max(refused)
        others = f" ({len(refused) - 1} more do not fit either)" if len(refused) > 1 else ""
        raise TaskError(f"{where}: {room.mistake(tokens)}{others}")


def _tokens(line: Mapping[str, Any], tokenize: Callable[[Messages], Sized]) -> int:
    try:
        return len(tokenize(line["prompt"]))
    except TaskError as refused:
        raise TaskError(f"{line['where']}: {refused}") from None


def _worth_counting(prompts: Prompts) -> list[int]:
    """The longest; and the first of each shape of conversation."""
    sizes: list[tuple[int, int]] = []
    shapes: dict[Shape, int] = {}
    for number in _spread(prompts):
        prompt = prompts.row(number).prompt
        sizes.append((_characters(prompt), -number))
        if not isinstance(prompt, str) and len(shapes) < COUNTED:
            shapes.setdefault(_shape(prompt), number)
    longest = [-negative for _, negative in heapq.nlargest(COUNTED, sizes)]
    return longest + [number for number in shapes.values() if number not in longest]


def _shape(messages: list[dict[str, Any]]) -> Shape:
    return tuple((message["role"], THOUGHTS in str(message["content"])) for message in messages)


def _spread(prompts: Prompts) -> Iterator[int]:
    rows = len(prompts)
    return (place * rows // min(rows, LOOKED_AT) for place in range(min(rows, LOOKED_AT)))


def _characters(prompt: Messages) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(str(message["content"])) for message in prompt)
